"""The rules of the layout, read from the source itself."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("common", "services", "launch")
MAX_LINES = 300
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers", "registry", "base", "misc"}
HOME = re.compile(r"/(home|root|Users|work)/\w")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file names in an import anywhere, `from a import b` as a and a.b."""
    return imports_of(ast.parse(path.read_text()))


def imports_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_at_load(path: Path) -> set[str]:
    """The modules that are imported when the file is: neither in a function nor for type checking only."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef) and not is_for_types(node)]
    return set(imports_of(tree))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_under(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offences(folder: str, *forbidden: str) -> list[str]:
    found = [(path, module) for path in sources(folder) for module in imports(path)]
    return [f"{path.relative_to(ROOT)}: {module}" for path, module in found if any(is_under(module, it) for it in forbidden)]


def own_file(module: str) -> Path | None:
    """The file of one of our modules, or nothing for a name inside one and for everybody else's."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def reachable(start: str) -> dict[Path, set[str]]:
    """Our files that importing `start` loads, packages on the way included, and what each imports."""
    found: dict[Path, set[str]] = {}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        for depth in range(1, len(parts) + 1):
            file = own_file(".".join(parts[:depth]))
            if file and file not in found:
                found[file] = imports_at_load(file)
                waiting += found[file]
    return found


def test_common_imports_no_service_and_no_launch() -> None:
    assert offences("common", "services", "launch", "tests") == []


def test_services_do_not_import_each_other_nor_launch() -> None:
    names = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").is_file())
    assert names == ["drafter", "exchange", "target"]
    for name in names:
        siblings = [f"services.{other}" for other in names if other != name]
        assert offences(f"services/{name}", "launch", "tests", *siblings) == []


def test_nothing_that_start_all_imports_imports_torch() -> None:
    files = reachable("launch.start_all")
    assert len(files) > 3
    torch_users = [file for file, modules in files.items() if any(is_under(it, "torch") for it in modules)]
    assert torch_users == []


def test_start_all_loads_no_torch_in_a_real_process() -> None:
    program = "import sys, launch.start_all; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("module", ["launch.demo", "launch.bootstrap"])
def test_the_bootstrap_needs_the_standard_library_only(module: str) -> None:
    named = {name.split(".")[0] for modules in reachable(module).values() for name in modules}
    assert named - set(sys.stdlib_module_names) <= {"launch"}


def test_no_file_is_longer_than_it_can_be_read() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(*ROOMS, "tests")}
    assert [f"{path.relative_to(ROOT)}: {length}" for path, length in lengths.items() if length > MAX_LINES] == []


def test_the_readme_has_a_line_for_every_file() -> None:
    tree = (ROOT / "README.md").read_text().partition("## The tree")[2].partition("## ")[0]
    folder, listed = "", set()
    for line in filter(None, (line.removeprefix("    ") for line in tree.splitlines())):
        name = line.split()[0]
        if not line.startswith(" "):
            folder = name
        elif name.endswith(".py"):
            listed.add(folder + name)
    files = {str(path.relative_to(ROOT)) for path in sources(*ROOMS) if path.name != "__init__.py"}
    assert sorted(files ^ listed) == []


def test_every_file_is_named_after_what_it_is() -> None:
    paths = [path for path in sources(*ROOMS, "tests") if EMPTY_NAMES & {path.stem, path.parent.name}]
    assert paths == []


def test_settings_come_from_the_configuration_not_from_the_environment() -> None:
    """A parent may hand its environment on to a child, and change it; it may not read a setting out of it."""
    found = [path for path in sources(*ROOMS) if any(map(reads_environment, ast.walk(ast.parse(path.read_text()))))]
    assert found == []


def reads_environment(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), ctx=ast.Load()):
            return True
        case ast.Attribute(value=ast.Attribute(attr="environ"), attr="get" | "pop" | "setdefault"):
            return True
        case ast.Compare(comparators=[ast.Attribute(attr="environ")]) | ast.Attribute(attr="getenv"):
            return True
        case ast.ImportFrom(module="os", names=names):
            return any(alias.name in ("environ", "getenv") for alias in names)
    return False


@pytest.mark.parametrize(
    ("line", "reads"),
    [
        ('os.environ["SEED"]', True),
        ('os.environ.get("SEED")', True),
        ('"SEED" in os.environ', True),
        ('os.getenv("SEED")', True),
        ("from os import environ", True),
        ('os.environ["SEED"] = "1"', False),
        ('child = os.environ | {"OMP_NUM_THREADS": "1"}', False),
    ],
)
def test_the_rule_on_the_environment_tells_reading_from_writing(line: str, reads: bool) -> None:
    assert any(map(reads_environment, ast.walk(ast.parse(line)))) is reads


def test_no_file_holds_the_path_of_a_home_directory() -> None:
    folders = (*ROOMS, "tests", "docker", ".ci")
    inside = [path for folder in folders for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    texts = [path for path in [*inside, *ROOT.glob("*")] if path.is_file() and path not in (Path(__file__), ROOT / ".git")]
    assert {"README.md", "setup.cfg", "Dockerfile", "run"} <= {path.name for path in texts}
    assert [path for path in texts if HOME.search(path.read_text(errors="replace"))] == []  # pictures are among them
