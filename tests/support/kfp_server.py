"""A double of Kubeflow Pipelines on loopback: keeps what it is sent, and checks it by the API."""

import base64
import contextlib
import email.parser
import email.policy
import json
import re
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

from support.http_server import Handler, http_server
from support.kfp_api import input_problem, operation_at, problems

Document = dict[str, Any]

_ROOT = "/apis/v2beta1"
_IDS = {
    "pipelines": "pipeline_id",
    "experiments": "experiment_id",
    "runs": "run_id",
    "recurringruns": "recurring_run_id",
}
_BEGAN = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str]
    body: Any
    headers: Mapping[str, str]
    file: str = ""

    @property
    def line(self) -> str:
        return f"{self.method} {self.path.removeprefix(_ROOT)}"


@dataclass
class Trouble:
    """An answer for requests that match, in place of the service's own."""

    pattern: str
    status: int
    body: str
    times: int


class RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class KfpServer:
    """Serves one installation; `problems` are of requests and answers, by the API's definitions.

    With `on_terminate` None, a run that is asked to stop stays CANCELING. `script` is what happens
    at each look at a run, before it is answered; the last one stays.
    """

    multi_user: bool = False
    version: str = "2.17.0"
    token: str = ""
    on_terminate: str | None = "CANCELED"
    problems: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    script: list[Callable[[], None]] = field(default_factory=list)
    kept: dict[str, list[Document]] = field(default_factory=dict)
    versions: dict[str, list[Document]] = field(default_factory=dict)
    nodes: dict[str, Document] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> "KfpServer":
        self.kept = {name: [] for name in _IDS}
        self._lock = threading.Lock()
        self._seconds = 0
        server = self

        class Answering(Handler):
            protocol_version = "HTTP/1.1"
            # Head and body in one packet: else each answer waits 40 ms for an acknowledgement.
            wbufsize = 1 << 16

            def do_GET(self) -> None:
                server._serve(self)

            do_POST = do_DELETE = do_GET

        self._stack = contextlib.ExitStack()
        self.url = self._stack.enter_context(http_server(Answering))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # What tests ask and set.

    def sent(self, method: str = "POST") -> list[str]:
        """Returns the requests of a method, in order, without those that ask for health."""
        return [r.line for r in self.requests if r.method == method and "healthz" not in r.path]

    def trouble(self, pattern: str, status: int, body: str, times: int = 1_000_000) -> None:
        self.troubles.append(Trouble(pattern, status, body, times))

    def run(self) -> dict[str, Any]:
        return self.kept["runs"][-1]

    def end(self, state: str, **fields: Any) -> None:
        self.run().update(state=state, finished_at=self._now(), **fields)

    def tell(self, *nodes: Document) -> None:
        """Gives the newest run a Workflow's nodes, as 2.17.0's api_converter.go shows them.

        It shows no error of any node, whatever the node's message says. `logs` are those that the
        workflow controller has archived (archiveLogs), by the id of the pod's node.
        """
        self.nodes = {str(node["id"]): node for node in nodes}
        self.run()["run_details"] = {"task_details": [_task_detail(node) for node in nodes]}

    def _log(self, node: str, depth: int = 3) -> str:
        """Returns a node's log as findArtifactKeyRecursive of 2.17 finds it: or a child's."""
        if node in self.logs or not depth:
            return self.logs.get(node, "")
        found = (self._log(each, depth - 1) for each in self.nodes[node].get("children", []))
        return next((log for log in found if log), "")

    # The service.

    def _serve(self, handler: Handler) -> None:
        parts = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        length = int(handler.headers.get("Content-Length") or 0)
        raw = handler.rfile.read(length)
        path = urllib.parse.unquote(parts.path)
        body, file = _content(handler.headers.get("Content-Type", ""), raw)
        request = Request(handler.command, path, query, body, dict(handler.headers.items()), file)
        with self._lock:
            self.requests.append(request)
        status, text = self._answer(request)
        handler.reply(status, text.encode())

    def _answer(self, request: Request) -> tuple[int, str]:
        with self._lock:
            for trouble in self.troubles:
                if trouble.times and re.fullmatch(trouble.pattern, request.line):
                    trouble.times -= 1
                    return trouble.status, trouble.body
            try:
                return 200, json.dumps(self._checked(request))
            except RefusedError as err:
                code = {401: 16, 403: 7, 404: 5, 409: 6}.get(err.status, 3)
                words = {"error": str(err), "code": code, "message": str(err)}
                return err.status, json.dumps(words)

    def _checked(self, request: Request) -> Any:
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            raise RefusedError(401, "Request header error: there is no user identity header.")
        # Served beside the published API (main.go).
        read = re.fullmatch(rf"{_ROOT}/runs/(.+)/nodes/(.+)/artifacts/main-logs:read", request.path)
        if read:
            self._get("runs", read[1])
            if read[2] not in self.nodes or not (log := self._log(read[2])):
                raise RefusedError(404, "artifact not found")
            return {"data": base64.b64encode(log.encode()).decode()}
        operation = operation_at(request.method, request.path)
        if operation is None:
            self.problems.append(f"no such operation: {request.line}")
            raise RefusedError(404, "Not Found")
        named = {parameter["name"]: parameter for parameter in operation.get("parameters", [])}
        for name in request.query:
            if named.get(name, {}).get("in") != "query":
                self.problems.append(f"{request.line}: no parameter {name} in the query")
        for parameter in named.values():
            if parameter["in"] == "body":
                self._check(request.line, parameter["schema"], request.body)
        if "filter" in request.query:
            told = {"predicates": _predicates(request)}
            self._check(f"{request.line} filter", {"$ref": "/v2beta1Filter"}, told)
        answer = self._do(request)
        schema = operation["responses"]["200"].get("schema", {})
        # Health is answered by hand, with more than its published schema.
        if "$ref" in schema and not request.path.endswith("/healthz"):
            self._check(f"answer to {request.line}", schema, answer)
        return answer

    def _check(self, what: str, schema: Any, document: Any) -> None:
        found = problems(str(schema["$ref"]).rpartition("/")[2], document)
        self.problems += [f"{what}: {problem}" for problem in found]
        if found and not what.startswith("answer"):
            raise RefusedError(400, f"Invalid input error: {found[0]}")

    def _do(self, request: Request) -> Any:
        words = request.path.removeprefix(_ROOT).strip("/").replace(":", "/").split("/")
        match request.method, words:
            case "GET", ["healthz"]:
                known = {"commit_sha": "7b70c7b", "pipeline_store": "database"}
                return {**known, "tag_name": self.version, "multi_user": self.multi_user}
            case "POST", ["pipelines", "upload"]:
                named = {key: request.query.get(key, "") for key in ("name", "namespace")}
                made = self._create("pipelines", {**named, "display_name": named["name"]})
                self._add_version(made, request)
                return made
            case "POST", ["pipelines", "upload_version"]:
                pipeline = self._get("pipelines", request.query["pipelineid"])
                return self._add_version(pipeline, request)
            case "GET", ["pipelines", id, "versions"]:
                self._get("pipelines", id)
                return self._page("pipeline_versions", self.versions[id], request)
            case "GET", ["pipelines", id, "versions", version]:
                return _find(self.versions.get(id, []), "pipeline_version_id", version)
            case "GET", [kind] if kind in _IDS:
                return self._list(kind, request)
            case "POST", [kind] if kind in _IDS:
                return self._create(kind, request.body)
            case "GET", [kind, id]:
                if kind == "runs" and self.script:
                    (self.script.pop(0) if len(self.script) > 1 else self.script[0])()
                return self._get(kind, id)
            case "DELETE", [kind, id]:
                self.kept[kind].remove(self._get(kind, id))
                return {}
            case "POST", ["runs", id, "terminate"]:
                return self._terminate(self._get("runs", id))
        raise AssertionError(f"not in this server: {request.line}")

    def _list(self, kind: str, request: Request) -> Any:
        namespace = request.query.get("namespace", "")
        if namespace and not self.multi_user:
            raise RefusedError(400, f"In single-user mode, {kind} cannot be filtered by namespace.")
        if self.multi_user and not namespace and kind != "pipelines":
            words = "Invalid input error: In multi-user mode, a namespace is needed"
            raise RefusedError(400, words)
        found = self.kept[kind]
        if self.multi_user:
            found = [item for item in found if self._namespace(kind, item) == namespace]
        return self._page(kind.replace("gruns", "gRuns"), found, request)

    def _namespace(self, kind: str, item: Document) -> Any:
        if kind in ("pipelines", "experiments"):
            return item.get("namespace", "")
        found = _find(self.kept["experiments"], "experiment_id", str(item["experiment_id"]))
        return found.get("namespace", "")

    def _page(self, name: str, found: list[Document], request: Request) -> Any:
        for predicate in _predicates(request):
            assert predicate["operation"] == "EQUALS"
            found = [i for i in found if i.get(predicate["key"]) == predicate["string_value"]]
        if request.query.get("sort_by") == "created_at desc":
            found = found[::-1]
        begin = int(request.query.get("page_token") or 0)
        end = begin + int(request.query.get("page_size", 20))
        answer: Document = {name: list(found[begin:end]), "total_size": len(found)}
        if end < len(found):
            answer["next_page_token"] = str(end)
        return answer

    def _create(self, kind: str, body: Any) -> Any:
        key = "name" if kind == "pipelines" else "display_name"
        if not body.get(key):
            raise RefusedError(400, f"Invalid input error: {key} is empty")
        is_taken = any(i.get(key) == body[key] for i in self.kept[kind])
        if kind in ("pipelines", "experiments") and is_taken:
            raise RefusedError(409, f"Already exist error: {body[key]} already exists")
        made: Document = {**body, _IDS[kind]: str(uuid.uuid4()), "created_at": self._now()}
        if kind == "pipelines":
            self.versions[str(made["pipeline_id"])] = []
        if kind in ("runs", "recurringruns"):
            self._check_reference(body)
        if kind == "runs":
            made["state"] = "PENDING"
            made["state_history"] = [{"update_time": self._now(), "state": "PENDING"}]
        if kind == "recurringruns":
            made["status"] = "ENABLED" if made.pop("mode", "") == "ENABLE" else "DISABLED"
            made["max_concurrency"] = str(made["max_concurrency"])
        self.kept[kind].append(made)
        return made

    def _check_reference(self, body: Document) -> None:
        reference = body.get("pipeline_version_reference")
        pipeline = self._get("pipelines", str(reference["pipeline_id"]))
        versions = self.versions[str(pipeline["pipeline_id"])]
        version = reference.get("pipeline_version_id")
        found = _find(versions, "pipeline_version_id", str(version)) if version else versions[-1]
        spec = found["pipeline_spec"]
        root = spec.get("pipeline_spec", spec)["root"]
        known = root.get("inputDefinitions", {}).get("parameters", {})
        for name, value in body.get("runtime_config", {}).get("parameters", {}).items():
            if said := input_problem(name, known.get(name, {}).get("parameterType"), value):
                raise RefusedError(400, f"Invalid input error: {said}")

    def _add_version(self, pipeline: Document, request: Request) -> Any:
        versions = self.versions[str(pipeline["pipeline_id"])]
        name = request.query["name"]
        if any(version["name"] == name for version in versions):
            raise RefusedError(409, f"Already exist error: version {name} already exists")
        documents = list(yaml.load_all(request.file, Loader=yaml.CSafeLoader))
        spec = documents[0]
        if len(documents) > 1:
            spec = {"pipeline_spec": documents[0], "platform_spec": documents[1]}
        made: Document = {
            "pipeline_id": pipeline["pipeline_id"],
            "pipeline_version_id": str(uuid.uuid4()),
            "name": name,
            "display_name": request.query.get("display_name", name),
            "description": request.query.get("description", ""),
            "created_at": self._now(),
            "pipeline_spec": spec,
        }
        versions.append(made)
        return made

    def _terminate(self, run: Document) -> Any:
        if run["state"] in ("SUCCEEDED", "FAILED", "CANCELED"):
            words = "Bad request error: run is not running and cannot be terminated"
            raise RefusedError(400, words)
        run["state_history"].append({"update_time": self._now(), "state": "CANCELING"})
        run["state"] = "CANCELING"
        if self.on_terminate:
            run.update(state=self.on_terminate, finished_at=self._now())
        return {}

    def _get(self, kind: str, id: str) -> Document:
        return _find(self.kept[kind], _IDS[kind], id)

    def _now(self) -> str:
        self._seconds += 1
        return (_BEGAN + timedelta(seconds=self._seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


# Words that the API has for phases of nodes; `Omitted` is none of them (model/run.go of 2.17.0).
PHASES = {each: each.upper() for each in ("Pending", "Running", "Succeeded", "Skipped", "Failed")}
PHASES["Error"] = "FAILED"


def _task_detail(node: Document) -> Document:
    # Ids of nodes, which no task of the answer has. What is empty is left out.
    told = [{"pod_name": child} for child in node.get("children", [])]
    return {
        "task_id": str(uuid.uuid5(uuid.NAMESPACE_URL, node["id"])),
        "display_name": node["displayName"],
        "create_time": "2026-11-20T10:00:10Z",
        "start_time": node.get("startedAt") or "0001-01-01T00:00:00Z",
        "end_time": node.get("finishedAt") or "0001-01-01T00:00:00Z",
        **({"state": PHASES[node["phase"]]} if node["phase"] in PHASES else {}),
        **({"child_tasks": told} if told else {}),
    }


def _predicates(request: Request) -> list[Document]:
    """Returns a listing's conditions; of an enum protobuf also reads the number, as kfp has it."""
    text = request.query.get("filter", "{}").replace("stringValue", "string_value")
    found = json.loads(text).get("predicates", [])
    for each in found:
        each["operation"] = {1: "EQUALS"}.get(each["operation"], each["operation"])
    return found


def _find(found: list[Document], key: str, id: str) -> Document:
    if (item := next((item for item in found if item.get(key) == id), None)) is None:
        raise RefusedError(404, f"ResourceNotFoundError: {id} not found")
    return item


def _content(kind: str, raw: bytes) -> tuple[Any, str]:
    if kind.startswith("multipart/form-data"):
        parser = email.parser.BytesParser(policy=email.policy.HTTP)
        message = parser.parsebytes(f"Content-Type: {kind}\r\n\r\n".encode() + raw)
        for part in message.iter_parts():
            if part.get_param("name", header="content-disposition") == "uploadfile":
                return None, part.get_payload(decode=True).decode()
    return (json.loads(raw) if raw.strip() else None), ""
