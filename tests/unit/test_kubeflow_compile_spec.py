import json

import yaml

from stoker.pipelines.kubeflow.compile import inputs_of, spec_of_answer, spec_of_text
from stoker.records import Json

PIPELINE: dict[str, Json] = {
    "sdkVersion": "kfp-2.17.0",
    "root": {
        "dag": {"tasks": {"train": {}}},
        "inputDefinitions": {
            "parameters": {
                "epochs": {"parameterType": "NUMBER_INTEGER", "defaultValue": 3.0},
                "workload": {"parameterType": "STRING", "defaultValue": '{"feed": {"credits": 2}}'},
            }
        },
    },
}
PLATFORMS: dict[str, Json] = {"platforms": {"kubernetes": {"deploymentSpec": {"seconds": 60.0}}}}


def test_answers_of_both_shapes_are_the_file_s_documents():
    for platforms in ({}, PLATFORMS):
        documents = [PIPELINE, platforms] if platforms else [PIPELINE]
        # The service's JSON has whole numbers without a point, and another compiler's version.
        text = json.dumps({"pipeline_spec": PIPELINE, "platform_spec": platforms})
        wrapped = json.loads(text.replace("3.0", "3").replace("60.0", "60").replace(".17", ".99"))
        answer = wrapped if platforms else wrapped["pipeline_spec"]
        assert spec_of_answer(answer) == spec_of_text(yaml.safe_dump_all(documents))
    assert spec_of_answer(None) is None


def test_the_workload_is_compared_by_its_keys():
    spec = spec_of_text(yaml.safe_dump(PIPELINE))
    assert inputs_of(spec) == {
        "epochs": {"parameterType": "NUMBER_INTEGER", "defaultValue": 3},
        "workload": {"parameterType": "STRING", "defaultValue": {"feed": {"credits": 2}}},
    }
    changed = yaml.safe_dump(PIPELINE).replace('"credits": 2', '"credits": 5')
    assert spec_of_text(changed) != spec
