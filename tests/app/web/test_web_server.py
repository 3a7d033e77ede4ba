"""The interface: marking, counting and what is refused, as HTTP."""

from __future__ import annotations

import io
import json
import threading
import time

import numpy as np
import pytest
from PIL import Image

from p3net import checkpoint
from p3net.app.web.session import Limits, Model
from p3net.network.regressor import Regressor, RegressorArchitecture


def upload(client, content: bytes, **fields):
    return client.post("/api/count", files={"image": ("a.jpg", content)}, data=fields)


def array(answer) -> np.ndarray:
    rows, columns = map(int, answer.headers["x-grid"].split())
    return np.frombuffer(answer.content, "<f4").reshape(rows, columns)


# --- marking ----------------------------------------------------------------------------------


def test_the_life_of_a_mark(serve, folder):
    client = serve()
    lines = client.get("/api/images").json()
    assert [line["name"] for line in lines] == [f"IMG_{i}.jpg" for i in range(1, 7)]
    assert lines[0]["marked"] is None
    address = f"/api/images/{lines[0]['id']}"
    image = client.get(address).json()
    assert (image["width"], image["height"], image["points"]) == (128, 96, None)
    body = {"points": [[1.5, 2], [3, 4.25]]}
    saved = client.put(f"{address}/marks", json=body, headers={"If-Match": image["version"]})
    assert saved.status_code == 200
    assert (folder / "points" / "IMG_1.jpg.txt").read_text() == "1.5 2.0\n3.0 4.25\n"
    again = client.get(address).json()
    assert (again["points"], again["version"]) == ([[1.5, 2], [3, 4.25]], saved.json()["version"])
    assert client.get("/api/images").json()[0]["marked"] == 2
    quoted = {"If-Match": f'"{again["version"]}"'}
    gone = client.put(f"{address}/marks", json={"points": None}, headers=quoted)
    assert gone.json() == {"points": None, "version": "none"}
    assert client.get("/api/images").json()[0]["marked"] is None


def test_a_stale_change_gets_the_present_marks(serve):
    client = serve()
    address = f"/api/images/{client.get('/api/images').json()[0]['id']}/marks"
    none = {"If-Match": "none"}
    first = client.put(address, json={"points": [[1, 1]]}, headers=none).json()
    stale = client.put(address, json={"points": [[2, 2]]}, headers=none)
    assert stale.status_code == 409
    assert (stale.json()["points"], stale.json()["version"]) == ([[1, 1]], first["version"])
    assert client.put(address, json={"points": []}).status_code == 428


@pytest.mark.parametrize(
    "body",
    [
        '{"points": [[NaN, 1]]}',
        '{"points": [[1e999, 1]]}',
        '{"points": [[1e7, 1]]}',
        '{"points": [[1]]}',
        '{"points": [[1, 2, 3]]}',
        '{"points": "all"}',
        '{"points": [[true, {}]]}',
        "{}",
        "not json",
        '{"points": [], "more": 1}',
    ],
)
def test_marks_that_are_no_points_are_refused(serve, body):
    client = serve()
    address = f"/api/images/{client.get('/api/images').json()[0]['id']}/marks"
    headers = {"If-Match": "none", "Content-Type": "application/json"}
    answer = client.put(address, content=body, headers=headers)
    assert answer.status_code == 422
    assert isinstance(answer.json()["detail"], str)
    assert client.get("/api/images").json()[0]["marked"] is None


def test_pictures_are_upright_whatever_the_file(serve, folder):
    tall = Image.effect_noise((60, 40), 50).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    tall.save(folder / "turned.jpg", exif=exif)
    tall.save(folder / "scan.tif")
    client = serve()
    ids = {line["name"]: line["id"] for line in client.get("/api/images").json()}
    image = client.get(f"/api/images/{ids['turned.jpg']}").json()
    assert (image["width"], image["height"]) == (40, 60)
    for name, size in (("turned.jpg", (40, 60)), ("scan.tif", (60, 40)), ("IMG_1.jpg", (128, 96))):
        answer = client.get(f"/api/images/{ids[name]}/picture")
        assert answer.headers["content-type"] == "image/jpeg"
        shown = Image.open(io.BytesIO(answer.content))
        assert (shown.size, shown.getexif().get(0x0112)) == (size, None)
        small = Image.open(io.BytesIO(client.get(f"/api/images/{ids[name]}/thumbnail").content))
        assert max(small.size) <= 192
    plain = client.get(f"/api/images/{ids['IMG_1.jpg']}/picture").content
    assert plain == (folder / "IMG_1.jpg").read_bytes()


def test_damaged_and_vanished_images_are_told(serve, folder):
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff not a photograph")
    client = serve()
    ids = {line["name"]: line["id"] for line in client.get("/api/images").json()}
    for part in ("", "/picture", "/thumbnail"):
        answer = client.get(f"/api/images/{ids['broken.jpg']}{part}")
        assert answer.status_code == 422
        assert str(folder) not in answer.text
    (folder / "IMG_1.jpg").unlink()
    assert client.get(f"/api/images/{ids['IMG_1.jpg']}/thumbnail").status_code in (404, 422)
    assert client.get("/api/next").status_code == 200


def test_a_damaged_mark_file_shows_in_the_list(serve, folder):
    (folder / "IMG_2.txt").write_text("abc\n")
    client = serve()
    line = client.get("/api/images").json()[1]
    assert (line["marked"], "two" in line["fault"] or "expected" in line["fault"]) == (None, True)
    assert client.get(f"/api/images/{line['id']}").status_code == 422


def test_two_files_for_one_image_are_told(serve, folder):
    client = serve()
    (folder / "IMG_2.txt").write_text("1 1\n")
    (folder / "IMG_2.csv").write_text("1 1\n")
    answer = client.get("/api/images")
    assert answer.status_code == 422
    assert "two annotations" in answer.json()["detail"]


# --- drafts and proposals ---------------------------------------------------------------------


def test_a_draft_has_the_models_points(serve, model, folder):
    client = serve(model=model)
    image = client.get("/api/images").json()[0]["id"]
    draft = client.post(f"/api/images/{image}/draft").json()
    expected = model.counter.count(folder / "IMG_1.jpg")
    assert draft["count"] == pytest.approx(expected.count)
    assert len(draft["points"]) == round(expected.count) == len(draft["scores"])
    assert all(0 <= x <= 128 and 0 <= y <= 96 for x, y in draft["points"])
    assert client.get("/api/images").json()[0]["marked"] is None


def wait_for(condition, seconds: float = 30):
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "too slow"
        time.sleep(0.05)
    return found


def test_what_to_mark_next_with_and_without_a_model(serve, model):
    client = serve()
    found = client.get("/api/next?number=3").json()
    assert len({each["id"] for each in found["images"]}) == 3
    assert "typical" in found["images"][0]["why"]
    assert found["unmarked"] == 0  # nothing for a model to look at
    first = found["images"][0]["id"]
    client.put(
        f"/api/images/{first}/marks", json={"points": []}, headers={"If-Match": "none"}
    ).raise_for_status()
    left = client.get("/api/next?number=50").json()["images"]
    assert len(left) == 5
    assert first not in {each["id"] for each in left}


def test_the_model_looks_at_unmarked_images_while_idle(serve, model):
    client = serve(model=model)
    assert client.get("/api/next").json()["unmarked"] == 6
    found = wait_for(lambda: (n := client.get("/api/next").json())["seen"] == 6 and n)
    whys = [each["why"] for each in found["images"]]
    assert all("The model counts" in why for why in whys)
    assert max(each["doubt"] for each in found["images"]) == 1.0


# --- counting ---------------------------------------------------------------------------------


def test_a_count_and_its_maps(serve, model, jpeg):
    client = serve(model=model)
    expected = model.counter.count(jpeg(3))
    answer = upload(client, jpeg(3))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["count"] == pytest.approx(expected.count)
    assert found["interval"]["low"] == pytest.approx(expected.interval.low)
    assert (found["width"], found["height"], found["tokens"]) == (128, 96, 25)
    address = f"/api/count/{found['id']}"
    density = array(client.get(f"{address}/maps/density"))
    assert density.shape == (12, 16)
    assert density.sum() == pytest.approx(expected.count, rel=1e-5)
    assert np.allclose(array(client.get(f"{address}/maps/branch-2")), expected.branches[1])
    spread = array(client.get(f"{address}/maps/spread"))
    assert np.allclose(spread**2, expected.variance, rtol=1e-4)
    looked = client.get(f"{address}/attention?branch=2&token=25")
    assert array(looked).sum() == pytest.approx(1, rel=1e-4)
    cell = [float(side) for side in looked.headers["x-cell"].split()]
    rows, columns = array(looked).shape
    assert cell[0] * columns >= 128
    assert cell[1] * rows >= 96
    for query in ("branch=3", "token=26", "token=0", "branch=0"):
        assert client.get(f"{address}/attention?{query}").status_code == 422
    assert len(client.get(f"{address}/points").json()["points"]) == round(expected.count)
    assert client.get(f"{address}/picture").content == jpeg(3)
    overlay = client.get(f"{address}/overlay?opacity=0.5&points=true")
    assert Image.open(io.BytesIO(overlay.content)).size == (128, 96)
    assert client.get(f"{address}/overlay?opacity=2").status_code == 422
    assert client.get(f"{address}/overlay?opacity=nan").status_code == 422


def test_regions_divide_the_count(serve, model, jpeg):
    client = serve(model=model)
    left = {"name": "left", "polygon": [[0, 0], [64, 0], [64, 96], [0, 96]]}
    right = {"name": "right", "polygon": [[64, 0], [128, 0], [128, 96], [64, 96]]}
    both = {"regions": [left, right]}
    found = upload(client, jpeg(), regions=json.dumps(both)).json()
    halves = [found["regions"][name]["count"] for name in ("left", "right")]
    assert sum(halves) == pytest.approx(found["count"], rel=1e-4)
    again = client.post(f"/api/count/{found['id']}/regions", json=both).json()
    assert again["left"]["count"] == pytest.approx(halves[0], rel=1e-4)


@pytest.mark.parametrize(
    "regions",
    [
        "[]",
        "{",
        '{"regions": []}',
        '{"regions": [{"name": "a", "polygon": [[0, 0], [1, 1]]}]}',
        '{"regions": [{"name": "a", "polygon": [[0, 0], [9, 9], [9, 0], [0, 9]]}]}',
        '{"regions": [{"name": "", "polygon": [[0, 0], [9, 9], [9, 0]]}]}',
        '{"regions": [{"name": "a", "polygon": [[0, 0], [NaN, 9], [9, 0]]}]}',
    ],
)
def test_regions_that_cannot_be_used_are_refused(serve, model, jpeg, regions):
    client = serve(model=model)
    assert upload(client, jpeg(), regions=regions).status_code == 422


def test_a_regressor_counts_without_distributions(serve, jpeg, tmp_path):
    path = tmp_path / "r.safetensors"
    checkpoint.save(path, Regressor(RegressorArchitecture(backbone="small")), {})
    client = serve(model=Model(checkpoint.load(path), "regressor"))
    found = upload(client, jpeg()).json()
    assert (found["interval"], found["branches"], found["tokens"]) == (None, 0, 0)
    address = f"/api/count/{found['id']}"
    assert client.get(f"{address}/maps/density").status_code == 200
    for part in ("maps/spread", "maps/branch-1", "attention"):
        answer = client.get(f"{address}/{part}")
        assert (answer.status_code, "regressor" in answer.json()["detail"]) == (422, True)
    wait_for(lambda: client.get("/api/next").json()["seen"] == 6)
    assert "The model" not in client.get("/api/next").json()["images"][0]["why"]


def test_old_counts_make_room(serve, model, jpeg):
    client = serve(model=model, limits=Limits(kept_counts=2))
    ids = [upload(client, jpeg(i)).json()["id"] for i in range(3)]
    codes = [client.get(f"/api/count/{id_}/maps/density").status_code for id_ in ids]
    assert codes == [404, 200, 200]


def test_without_a_model_or_a_folder_each_says_what_is_missing(serve, model, jpeg):
    client = serve()
    assert "no model yet" in upload(client, jpeg()).json()["detail"]
    image = client.get("/api/images").json()[0]["id"]
    assert client.post(f"/api/images/{image}/draft").status_code == 409
    counting = serve(model=model, data=False)
    for path in ("images", "next", "runs", f"images/{image}"):
        answer = counting.get(f"/api/{path}")
        assert (answer.status_code, "no folder" in answer.json()["detail"]) == (409, True)
    assert counting.get("/api/status").json()["folder"] is None
    assert upload(counting, jpeg()).status_code == 200


def test_the_newest_run_of_the_folder_counts_where_no_model_is_given(serve, folder, model_file):
    for number, content in ((1, model_file.read_bytes()), (2, b"")):
        (folder / ".p3net" / "runs" / str(number)).mkdir(parents=True)
        if content:
            (folder / ".p3net" / "runs" / str(number) / "model.safetensors").write_bytes(content)
    client = serve()
    assert client.get("/api/status").json()["model"]["name"] == "run 1"
    assert client.post("/api/runs/2/use").status_code == 422
    assert client.post("/api/runs/1/use").json()["run"] == 1
    assert client.get("/api/runs").json()[1]["state"] == "finished"


def test_a_damaged_model_does_not_keep_from_marking(serve, folder):
    (folder / ".p3net" / "runs" / "1").mkdir(parents=True)
    (folder / ".p3net" / "runs" / "1" / "model.safetensors").write_bytes(b"not a model")
    client = serve()
    assert client.get("/api/status").json()["model"] is None
    assert client.post("/api/runs/1/use").status_code == 422


def test_a_slow_count_does_not_stop_the_others_and_a_full_queue_is_busy(serve, model, jpeg):
    client = serve(model=model, limits=Limits(waiting=1))
    session = client.app.state.session
    go, begun = threading.Event(), threading.Event()

    def slow():
        begun.set()
        go.wait(20)

    session.worker.submit(slow)
    assert begun.wait(5)
    session.worker.submit(lambda: None)
    busy = upload(client, jpeg())
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "2")
    assert "busy" in busy.json()["detail"]
    assert client.get("/api/images").status_code == 200
    assert client.get("/").status_code == 200
    go.set()
    wait_for(lambda: not session.worker.waiting)
    assert upload(client, jpeg()).status_code == 200


# --- what cannot be used ----------------------------------------------------------------------


def bomb() -> bytes:
    """A PNG of a few kilobytes that would be 900 megapixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    lines = zlib.compress(bytes(10_000_000), 9)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.4",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94.",
        b"PK\x03\x04",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_only_images_are_counted(serve, model, content):
    answer = upload(serve(model=model), content)
    assert answer.status_code == 422
    assert isinstance(answer.json()["detail"], str)


def test_bombs_are_refused_before_they_are_decoded(serve, model, jpeg):
    client = serve(model=model, limits=Limits(upload_pixels=10_000))
    started = time.process_time()
    answer = upload(client, bomb())
    assert (answer.status_code, "pixels" in answer.json()["detail"]) == (422, True)
    assert time.process_time() - started < 2
    assert "12288" not in answer.text
    assert upload(client, jpeg()).json()["detail"].startswith("128 × 96 pixels are more than")


def test_a_truncated_photograph_is_told(serve, model, jpeg):
    answer = upload(serve(model=model), jpeg(1, 400, 300)[:2000])
    assert (answer.status_code, "truncated" in answer.json()["detail"]) == (422, True)
