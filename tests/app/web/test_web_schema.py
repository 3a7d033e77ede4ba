"""schemathesis against the OpenAPI: whatever is sent, never a server error."""

from __future__ import annotations

import io
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from p3net.app.web.runs import Runs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")

CODES = {200, 201, 400, 401, 403, 404, 405, 406, 409, 413, 415, 421, 422, 428, 503}
EFFORT = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def known(serve, model, jpeg, monkeypatch):
    """A server with an image, a count and a run, which pretends to train."""
    monkeypatch.setattr(Runs, "_spawn", lambda self, number, words: None)
    client = serve(model=model)
    image = client.get("/api/images").json()[0]["id"]
    client.put(
        f"/api/images/{image}/marks", json={"points": [[1, 2]]}, headers={"If-Match": "none"}
    )
    count = client.post("/api/count", files={"image": jpeg()}).json()["id"]
    client.post("/api/runs", json={"validation": 0})
    return client, {"image": image, "count": count, "run": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_no_request_makes_the_server_fail(known):
    client, names = known
    schema = schemathesis.openapi.from_dict(client.get("/api/openapi.json").json())
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) >= 20
    seen = set()
    for operation in operations:

        @EFFORT
        @given(operation.as_strategy(), st.booleans())
        def send(case, real):
            if real:  # half of the time something that exists
                for name in case.path_parameters or {}:
                    case.path_parameters[name] = names.get(name, case.path_parameters[name])
            arguments = case.as_transport_kwargs(base_url="http://localhost:8000")
            arguments = {k: v for k, v in arguments.items() if v is not None}
            try:
                request = client.build_request(
                    arguments.pop("method"), arguments.pop("url"), **_fitting(arguments)
                )
            except (ValueError, TypeError):
                return  # no client can send this
            answer = client.send(request)
            assert answer.status_code in CODES, (answer.status_code, answer.text)
            seen.add(answer.status_code)

        send()
    assert {200, 404, 409, 422} <= seen


def _fitting(arguments):
    """What httpx takes, of what requests would."""
    arguments = {
        k: v
        for k, v in arguments.items()
        if k in {"json", "data", "files", "headers", "params", "cookies"}
    }
    if isinstance(arguments.get("data"), bytes):
        arguments["content"] = arguments.pop("data")
    arguments.pop("cookies", None)
    arguments["headers"] = {
        k: v for k, v in dict(arguments.get("headers") or {}).items() if str(v).isascii()
    }
    return arguments


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=200), st.integers(0, 600))
def test_no_file_makes_the_server_fail(known_model, noise, place):
    """Photographs with bytes exchanged anywhere are counted or refused."""
    client, whole = known_model
    content = bytearray(whole)
    content[place : place + len(noise)] = noise
    answer = client.post("/api/count", files={"image": ("a", bytes(content))})
    assert answer.status_code in (200, 422)


@pytest.fixture
def known_model(serve, model):
    file = io.BytesIO()
    Image.effect_noise((32, 32), 80).save(file, "PNG")
    return serve(model=model, data=False), file.getvalue()
