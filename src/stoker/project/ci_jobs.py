"""The jobs of continuous integration that `stoker init` writes: compile, check, deploy.

A pull request compiles the pipeline and shows what it would change; the main branch deploys it. No
key is stored: the job gets a role by OpenID Connect, on Kubeflow a token by the CI's own secrets.
"""

from pathlib import Path
from typing import Literal

CiHost = Literal["github", "gitlab"]

_GITHUB_FILE = Path(".github/workflows/stoker.yml")
_GITLAB_FILE = Path(".gitlab-ci.yml")
# Of a project that has a .gitlab-ci.yml, which includes it.
_GITLAB_PART = Path(".gitlab/stoker.yml")

# `@` names what differs: TARGET, FILE, OUT; and the steps that log in.
_GITHUB = """\
# A wrong workload fails here, and not when it runs. The role and the variables:
# docs/how-to/ci.md of stoker's checkout.
name: stoker
on:
  pull_request:
  push: {branches: [main]}
permissions: {contents: read}
env:
  # stoker is not on PyPI. The repository's variable STOKER is what pip installs: the address of a
  # wheel, or of a repository: stoker[@EXTRAS] @ git+https://HOST/stoker@REVISION
  STOKER: ${{ vars.STOKER }}
jobs:
  compile:
    runs-on: ubuntu-latest
    timeout-minutes: 20
    steps:
@SETUP    - run: stoker compile @TARGET @FILE --out @OUT

  # What a merge would change: keys of the workload, files of the code. It sends nothing.
  check:
    # A pull request from a fork gets no credentials.
    if: >-
      github.event_name == 'pull_request' &&
      github.event.pull_request.head.repo.full_name == github.repository
    needs: compile
    runs-on: ubuntu-latest
    timeout-minutes: 20
    permissions: {contents: read@IDTOKEN}
    steps:
@SETUP@LOGIN    # 10: it would change; 11: it is new.
    - run: stoker upload @TARGET @FILE --check || case $? in 10|11) ;; *) exit 1;; esac@ENV

  deploy:
    if: github.event_name == 'push'
    needs: compile
    runs-on: ubuntu-latest
    timeout-minutes: 20
    # Its rules may ask for a review.
    environment: production
    concurrency: stoker-deploy
    permissions: {contents: read@IDTOKEN}
    steps:
@SETUP@LOGIN    - run: stoker upload @TARGET @FILE --yes@ENV
"""
_GITHUB_SETUP = """\
    - uses: actions/checkout@v4
      with: {persist-credentials: false}
    - uses: actions/setup-python@v5
      with: {python-version: "3.12"}
    - run: pip install "$STOKER"
"""
_GITHUB_AWS = """\
    - uses: aws-actions/configure-aws-credentials@v4
      with: {role-to-assume: "${{ vars.STOKER_AWS_ROLE }}", aws-region: "${{ vars.AWS_REGION }}"}
"""
_GITHUB_KUBEFLOW = """
      env:
        KF_PIPELINES_ENDPOINT: ${{ vars.KF_PIPELINES_ENDPOINT }}
        STOKER_KUBEFLOW_TOKEN: ${{ secrets.STOKER_KUBEFLOW_TOKEN }}"""

_GITLAB = """\
# A wrong workload fails here, and not when it runs. The role and the variables:
# docs/how-to/ci.md of stoker's checkout.
.stoker:
  image: python:3.12
  timeout: 20 minutes
  # stoker is not on PyPI. The project's variable STOKER is what pip installs: the address of a
  # wheel, or of a repository: stoker[@EXTRAS] @ git+https://HOST/stoker@REVISION
  before_script: [pip install "$STOKER"]

stoker-compile:
  extends: .stoker
  stage: test
  script: [stoker compile @TARGET @FILE --out @OUT]
  rules:
  - if: $CI_PIPELINE_SOURCE == "merge_request_event"
  - if: $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH

@ACCESS
# What a merge would change: keys of the workload, files of the code. It sends nothing.
stoker-check:
  extends: .stoker-access
  stage: test
  needs: [stoker-compile]
  script: [stoker upload @TARGET @FILE --check]
  # 10: it would change; 11: it is new.
  allow_failure: {exit_codes: [10, 11]}
  rules:
  - if: $CI_PIPELINE_SOURCE == "merge_request_event"

stoker-deploy:
  extends: .stoker-access
  stage: deploy
  script: [stoker upload @TARGET @FILE --yes]
  environment: production
  resource_group: stoker-deploy
  rules:
  - if: $CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH
"""
_GITLAB_AWS = """\
# With the variables STOKER_AWS_ROLE (its ARN) and AWS_DEFAULT_REGION.
.stoker-access:
  extends: .stoker
  id_tokens:
    STOKER_ID_TOKEN: {aud: sts.amazonaws.com}
  before_script:
  - pip install "$STOKER"
  - (umask 077; printf %s "$STOKER_ID_TOKEN" > /tmp/id-token)
  - export AWS_WEB_IDENTITY_TOKEN_FILE=/tmp/id-token AWS_ROLE_ARN="$STOKER_AWS_ROLE"
  - export AWS_ROLE_SESSION_NAME="stoker-$CI_PIPELINE_ID"
"""
_GITLAB_KUBEFLOW = """\
# With the variables KF_PIPELINES_ENDPOINT and STOKER_KUBEFLOW_TOKEN (masked).
.stoker-access:
  extends: .stoker
"""


def ci_file(host: CiHost, folder: Path) -> Path:
    """Returns where a project has its jobs; beside a .gitlab-ci.yml, which is not overwritten."""
    if host == "github":
        return _GITHUB_FILE
    return _GITLAB_PART if (folder / _GITLAB_FILE).exists() else _GITLAB_FILE


def ci_text(host: CiHost, *, target: str, file: Path, out: str) -> str:
    """Returns the jobs that compile, check and deploy a pipeline.

    Args:
        host: Where they run.
        target: sagemaker or kubeflow.
        file: The workload's file.
        out: The file that is compiled.
    """
    is_aws = target == "sagemaker"
    words = {
        "@SETUP": _GITHUB_SETUP,
        "@TARGET": target,
        "@FILE": str(file),
        "@OUT": out,
        "@EXTRAS": "aws,sagemaker" if is_aws else "kubeflow",
        "@IDTOKEN": ", id-token: write" if is_aws else "",
        "@LOGIN": _GITHUB_AWS if is_aws else "",
        "@ENV": "" if is_aws else _GITHUB_KUBEFLOW,
        "@ACCESS": _GITLAB_AWS if is_aws else _GITLAB_KUBEFLOW,
    }
    text = _GITHUB if host == "github" else _GITLAB
    for name, word in words.items():
        text = text.replace(name, word)
    return text
