"""The door: hosts, origins, tokens, sizes, paths, headers."""

from __future__ import annotations

import pytest


def test_every_answer_forbids_what_comes_from_elsewhere(serve):
    client = serve()
    for path in ("/", "/static/app.js", "/api/status", "/api/images", "/nothing"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers
    assert client.get("/api/status").headers["cache-control"] == "no-store"


def test_the_page_asks_for_nothing_from_elsewhere(serve):
    client = serve()
    texts = [client.get("/").text]
    names = ["app", "api", "count", "mark", "train", "points", "sheet", "view", "dots"]
    texts += [client.get(f"/static/{name}.js").text for name in names]
    texts.append(client.get("/static/style.css").text)
    for text in texts:
        assert "http://" not in text
        assert "https://" not in text
    assert client.get("/docs").status_code == 404
    assert client.get("/api/openapi.json").json()["info"]["title"] == "p3net serve"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", "", "[::2]"],
)
def test_other_names_are_refused_on_loopback(serve, host):
    """DNS rebinding: the browser believes that the attacker's name is this machine."""
    client = serve()
    for path in ("/", "/api/images"):
        assert client.get(path, headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:81", "[::1]:8000", "LOCALHOST:1"])
def test_names_of_this_machine_are_taken(serve, host):
    assert serve().get("/api/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost:9000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(serve, folder, headers):
    client = serve()
    image = client.get("/api/images").json()[0]["id"]
    answers = [
        client.put(
            f"/api/images/{image}/marks",
            json={"points": [[1, 1]]},
            headers={"If-Match": "none", **headers},
        ),
        client.post("/api/runs", json={}, headers=headers),
        client.post("/api/count", files={"image": b"x"}, headers=headers),
        client.get("/api/images", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * 4
    assert not (folder / "points").exists()


def test_the_pages_own_requests_pass(serve):
    own = {"Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
    assert serve().post("/api/runs/1/stop", headers=own).status_code == 404


def test_without_the_token_nothing_is_answered(serve):
    client = serve(token="secret-token")
    paths = ("/", "/?token=wrong", "/?token=", "/static/app.js", "/api/status", "/api/openapi.json")
    for path in paths:
        assert client.get(path).status_code == 401
    assert client.put("/api/images/x/marks", json={"points": []}).status_code == 401
    for wrong in ("Bearer wrong", "Basic secret-token", "secret-token", "Bearer "):
        assert client.get("/api/status", headers={"Authorization": wrong}).status_code == 401
    assert client.get("/api/status?token=secret-token").status_code == 401
    bearer = {"Authorization": "Bearer secret-token"}
    assert client.get("/api/status", headers=bearer).status_code == 200
    assert client.get("/api/status", headers={**bearer, "Host": "camera.local"}).status_code == 200


def test_the_address_with_the_token_opens_the_page_and_leaves_a_strict_cookie(serve):
    client = serve(token="secret-token")
    answer = client.get("/?token=secret-token", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/api/status").status_code == 200
    client.cookies.clear()
    assert client.get("/", headers={"Cookie": "p3net_token=wrong"}).status_code == 401
    assert client.get("/", headers={"Cookie": '=;"\x07'}).status_code == 401


def test_a_cookie_does_not_make_up_for_a_foreign_origin(serve):
    client = serve(token="secret-token")
    client.get("/?token=secret-token")
    evil = {"Origin": "https://evil.example"}
    assert client.post("/api/runs", json={}, headers=evil).status_code == 403


def test_large_bodies_are_refused_announced_or_not(serve, model):
    client = serve(model=model, body_bytes=100_000)
    files = {"image": ("a.jpg", bytes(200_000))}
    assert client.post("/api/count", files=files).status_code == 413
    read = 0

    def endless():
        nonlocal read
        yield b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
        while read < 50_000_000:
            read += 50_000
            yield bytes(50_000)

    streamed = client.post(
        "/api/count",
        content=endless(),
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert streamed.status_code == 413
    image = client.get("/api/images").json()[0]["id"]
    marks = {"points": [[0.123456, 0.123456]] * 10_000}
    address = f"/api/images/{image}/marks"
    assert client.put(address, json=marks, headers={"If-Match": "none"}).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/api/images/..%2f..%2fetc%2fpasswd/picture",
        "/api/images/%2e%2e/picture",
        "/api/images/IMG_1.jpg/picture",
        "/api/images/....//....//etc/passwd/picture",
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/cli.py",
        "/static//etc/passwd",
        "/api/runs/..%2f..%2f/stop",
        "/api/count/..%2f..%2fx/maps/density",
    ],
)
def test_paths_do_not_leave_the_folder(serve, path):
    client = serve()
    for answer in (client.get(path), client.post(path)):
        assert answer.status_code in (404, 405, 422)
        assert "root:" not in answer.text
        assert "import" not in answer.text


def test_links_out_of_the_folder_are_images_or_nothing(serve, folder, tmp_path):
    """A link is the owner's own; what it leads to is shown only as an image."""
    (tmp_path / "secret.txt").write_text("root: secret")
    (folder / "link.jpg").symlink_to(tmp_path / "secret.txt")
    client = serve()
    image = next(e["id"] for e in client.get("/api/images").json() if e["name"] == "link.jpg")
    answer = client.get(f"/api/images/{image}/picture")
    assert (answer.status_code, "secret" in answer.text) == (422, False)
