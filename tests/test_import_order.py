"""The first law: the core's modules form one ordered list; a module imports only from above it."""

import ast
from pathlib import Path

import pytest

import p3net

ROOT = Path(p3net.__file__).parent

# fmt: off
ORDER = (
    "errors", "randomness", "allocator", "locking", "structures", "intervals", "targets",
    "data.layout", "data.images", "data.matfile", "data.readers", "data.annotations",
    "data.folders", "data.exports", "data.formats", "data.sprites", "data.scenery",
    "data.synthetic", "data.surfaces", "data.catalogue", "data.splits", "data.checking",
    "data.transforms", "data.cache", "data.loading", "data.video_source", "data.video",
    "network.winograd", "network.depthwise", "network.fusion", "network.backbone", "network.vgg",
    "network.lite0", "network.backbones", "network.weights",
    "network.decoder", "network.p3net", "network.regressor", "network.cost",
    "losses.pdm", "losses.ecr", "losses.pointwise", "losses.bayesian", "losses.transport",
    "losses.ranking",
    "averaging", "methods.base", "methods.views", "methods.supervised", "methods.teacher",
    "methods.p3net", "methods.mean_teacher", "methods.ranking",
    "metrics", "points", "regions", "proposals", "prediction", "uncertainty", "tiling", "counting",
    "evaluation", "hub", "runtimes", "checkpoint", "export",
    "recipe", "configuration", "training", "experiment", "trial", "study",
)
# fmt: on

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if path.name != "__init__.py"
)


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, anywhere in its text."""
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    own = {name.removeprefix("p3net.") for name in names if name.startswith("p3net.")}
    return {name for name in own if name in MODULES}


def test_every_module_stands_in_the_list() -> None:
    core = {module for module in MODULES if not module.startswith("app.")}
    assert core - {"__main__"} == set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_from_above(module: str) -> None:
    if module.startswith("app.") or module == "__main__":
        return
    above = set(ORDER[: ORDER.index(module)])
    below = imports(module) - above
    assert not below, f"{module} imports {sorted(below)}, which do not stand above it"
