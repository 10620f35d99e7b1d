"""Which package may import which, and which file alone may use a tool."""

import ast
import re

import pytest

MAY_IMPORT = {
    "eagle3": ("eagle3",),
    "tasks": ("tasks", "eagle3"),
    "flows": ("flows", "tasks", "eagle3.config", "eagle3.artifacts", "eagle3.errors"),
}
ONLY_USERS = {
    "mlflow": ("tasks/tracking.py",),
    "dvc": ("tasks/dvc_stage.py",),
    "zarr": ("eagle3/store/",),
    "prefect": ("tasks/", "flows/"),
    "ray": ("eagle3/ray_workers.py",),
    "s3fs": ("eagle3/store/bucket.py",),
    # Its UnpicklingError alone: torch raises it for a file that weights_only refuses.
    "pickle": ("eagle3/foreign_weights.py",),
}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_go_from_flows_to_tasks_to_eagle3(imports, root, package):
    wrong = []
    for path in sorted((root / package).rglob("*.py")):
        for module in imports.modules(path):
            ours = module.split(".")[0] in MAY_IMPORT
            if ours and not any(is_within(module, allowed) for allowed in MAY_IMPORT[package]):
                wrong.append(f"{path.relative_to(root)} imports {module}")
    assert wrong == []


@pytest.mark.parametrize("tool", ONLY_USERS)
def test_a_tool_has_one_owner(imports, root, tool):
    wrong = []
    for path in imports.files:
        name = str(path.relative_to(root))
        uses = any(is_within(module, tool) for module in imports.modules(path))
        if uses and not name.startswith(ONLY_USERS[tool]):
            wrong.append(name)
    assert wrong == []


def test_the_library_and_the_stages_never_import_prefect_before_it_is_wanted(imports, root):
    """`dvc repro` without a server must not pay for Prefect: its imports are inside functions."""
    wrong = []
    for path in [*(root / "tasks").glob("*.py"), *(root / "flows").glob("*.py")]:
        top_level = imports.top_level_modules(path)
        if path.name in ("pipeline.py", "deployment.py"):
            continue
        wrong += [path.name for module in top_level if is_within(module, "prefect")]
    assert wrong == []


def test_nothing_is_stored_in_formats_that_can_run_code(imports, root):
    wrong = []
    for path in imports.files:
        for call in imports.calls(path):
            if call.name == "torch.save":
                wrong.append(f"{path.relative_to(root)}:{call.line} torch.save")
            if call.name == "torch.load" and call.keywords.get("weights_only") != "True":
                wrong.append(
                    f"{path.relative_to(root)}:{call.line} torch.load without weights_only"
                )
    assert wrong == []


def test_no_file_is_named_for_nothing(imports):
    vague = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
    assert [path for path in imports.files if path.name in vague] == []


def test_files_open_with_their_one_job(imports, root):
    silent = [
        str(path.relative_to(root))
        for path in imports.files
        if path.stat().st_size and not ast.get_docstring(imports.tree(path))
    ]
    assert silent == []


def test_files_stay_under_300_lines(imports, root):
    long = {
        str(path.relative_to(root)): lines
        for path in imports.files
        if (lines := len(path.read_text().splitlines())) > 300
    }
    assert long == {}


def test_the_lock_names_no_registry_and_no_path_of_a_machine(root):
    lines = (root / "requirements.lock").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
