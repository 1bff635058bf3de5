"""The rules of the layout, read from the source itself: who imports whom, lengths, names, docstrings, READMEs."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("common", "services", "launch")
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_README_LINES = 300, 40, 200
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "managers", "registry", "base", "misc"}
HOME = re.compile(r"/(home|root|Users|work)/\w")

# Rooms of the services that are libraries: `launch` may import them.
LIBRARIES = ["services.drafter.model", "services.drafter.folder", "services.drafter.kernels"]
LIBRARIES += ["services.target.model", "services.target.rows", "services.target.pack", "services.target.loading"]
LIBRARIES += ["services.target.linear_attention", "services.target.architecture", "services.target.checkpoint"]
LIBRARIES += ["services.exchange.plan", "services.exchange.samples"]
MEASURE_SERVICES = ("launch.balance", "launch.bench")  # they time parts of the services, so they import them

VAGUE_OPENINGS = ("What ", "Where ", "How ", "As ", "Of ", "Whether ", "The same ")
BANNED = "place life told bury river rig trainee journal snapshot look strike doubt sides walk renew asked above below power"
BANNED_WORDS = {"lives", *BANNED.split(), *(f"{word}s" for word in BANNED.split())}
ALLOWED_NAMES = {"river"}  # the command launch.bench.river

ROOMS_WITH_README = ["common", "services", "services/exchange", "services/target", "services/drafter", "launch"]
ROOMS_WITH_README += [f"launch/{room}" for room in ("operate", "data", "decoding", "parity", "bench", "configs")]
ROOMS_WITH_README += ["tests"]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports anywhere, `from a import b` as a and a.b."""
    yield from imports_of(path, ast.walk(tree(path)))


def imports_at_load(path: Path) -> Iterator[str]:
    """Yield the modules that are imported when the file is: neither in a function nor for type checking only."""
    yield from imports_of(path, nodes_at_load(tree(path)))


def nodes_at_load(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
        yield from nodes_at_load(child)


def imports_of(path: Path, nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def offences(folder: str, *forbidden: str) -> list[str]:
    found = [(path, module) for path in sources(folder) for module in imports(path)]
    return [f"{path.relative_to(ROOT)}: {module}" for path, module in found if is_under(module, *forbidden)]


def own_file(module: str) -> Path | None:
    """Return the file of one of our modules, or None for a name inside one and for modules of others."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def own_imports(path: Path, read: Callable[[Path], Iterator[str]] = imports) -> set[Path]:
    """Return our files that a file imports, without the packages that they lie in."""
    files = {own_file(module) for module in read(path)}
    return {file for file in files if file and file != path and file.name != "__init__.py"}


def reachable(*starts: Path, read: Callable[[Path], Iterator[str]] = imports) -> set[Path]:
    """Return these files and all of ours that they import, directly or not."""
    found, waiting = set(starts), list(starts)
    while waiting:
        new = own_imports(waiting.pop(), read) - found
        found |= new
        waiting += new
    return found


def test_common_imports_no_service_and_no_launch() -> None:
    assert offences("common", "services", "launch", "tests") == []


def test_services_do_not_import_each_other_nor_launch() -> None:
    names = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").is_file())
    assert names == ["drafter", "exchange", "target"]
    for name in names:
        siblings = [f"services.{other}" for other in names if other != name]
        assert offences(f"services/{name}", "launch", "tests", *siblings) == []


def test_launch_imports_only_libraries_of_the_services() -> None:
    assert offences("launch", "tests") == []
    checked = [path for path in sources("launch") if not is_under(module_name(path), *MEASURE_SERVICES)]
    found = {(path, file) for path in checked for file in own_imports(path) if is_under(module_name(file), "services")}
    wrong = [f"{module_name(path)}: {module_name(file)}" for path, file in found if not is_under(module_name(file), *LIBRARIES)]
    assert sorted(wrong) == []


def test_common_holds_only_files_that_two_users_need() -> None:
    users = ("services/exchange", "services/target", "services/drafter", "launch")
    needed = [reachable(*sources(folder)) for folder in users]
    modules = [path for path in sources("common") if path.name != "__init__.py"]
    one_user = [path for path in modules if sum(path in files for files in needed) < 2]
    assert [module_name(path) for path in one_user] == []


def test_no_imports_in_a_circle() -> None:
    graph = TopologicalSorter({path: own_imports(path, imports_at_load) for path in sources(*ROOMS)})
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(map(module_name, error.args[1])))


def test_start_all_loads_no_torch() -> None:
    files = reachable(ROOT / "launch" / "start_all.py", read=imports_at_load)
    assert len(files) > 3
    assert [path for path in files if any(is_under(it, "torch", "transformers") for it in imports_at_load(path))] == []
    program = "import sys, launch.start_all; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("name", ["demo", "bootstrap"])
def test_the_bootstrap_needs_the_standard_library_only(name: str) -> None:
    modules = {module.split(".")[0] for path in reachable(ROOT / f"launch/{name}.py") for module in imports(path)}
    assert modules - set(sys.stdlib_module_names) <= {"launch"}


def test_files_and_functions_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources(*ROOMS, "tests")}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}
    lengths = {
        f"{path.relative_to(ROOT)}: {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in sources(*ROOMS, "tests")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def test_every_file_is_named_after_its_content() -> None:
    assert [path for path in sources(*ROOMS, "tests") if EMPTY_NAMES & {path.stem, path.parent.name}] == []


def test_docstrings_are_sentences_that_begin_with_a_verb() -> None:
    found = [(path, docstring) for path in sources(*ROOMS, "tests") for docstring in docstrings(path)]
    vague = [f"{path.relative_to(ROOT)}: {text.splitlines()[0]}" for path, text in found if text.startswith(VAGUE_OPENINGS)]
    assert vague == []


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def test_names_are_plain_words_of_the_field() -> None:
    found = {(path, name) for path in sources(*ROOMS, "tests") for name in names(path) if banned_words(name)}
    assert sorted(f"{path.relative_to(ROOT)}: {name}" for path, name in found if name not in ALLOWED_NAMES) == []


def names(path: Path) -> Iterator[str]:
    """Yield the names that a file makes: its own, its folder's, and those of classes, functions, parameters and variables."""
    yield from (path.stem, path.parent.name)
    for node in ast.walk(tree(path)):
        match node:
            case ast.ClassDef(name=str(name)) | ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def banned_words(name: str) -> set[str]:
    """Return the banned among the words of a name in snake_case or CamelCase."""
    return BANNED_WORDS & {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("place", {"place"}),
        ("test_all_places", {"places"}),
        ("RiverRig", {"river", "rig"}),
        ("_LIFE", {"life"}),
        ("replace", set()),
        ("LookupTable", set()),
    ],
)
def test_banned_words_are_whole_words(name: str, found: set[str]) -> None:
    assert banned_words(name) == found


def test_the_top_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_every_room_has_a_readme() -> None:
    assert [room for room in ROOMS_WITH_README if not (ROOT / room / "README.md").is_file()] == []


def test_readmes_name_the_files_of_their_room() -> None:
    """Test files that mirror the tree need no line."""
    files = [path for path in sources(*ROOMS, "tests/builders") if path.name != "__init__.py"]
    files += (ROOT / "tests").glob("*.py")
    texts = {path: path.read_text() for path in {nearest_readme(file) for file in files}}
    missing = [file for file in files if f"`{file.name}`" not in texts[nearest_readme(file)]]
    assert [str(file.relative_to(ROOT)) for file in missing] == []


def nearest_readme(file: Path) -> Path:
    """Return the README of a file's folder or of the nearest folder around it that has one; the top one does not count."""
    found = [folder / "README.md" for folder in file.parents if folder.is_relative_to(ROOT)]
    return next((path for path in found if path.is_file()), ROOT / "README.md")


def test_settings_come_from_the_configuration_not_from_the_environment() -> None:
    """A parent may change the environment of a child and hand it on, but no code reads a setting out of it."""
    assert [path for path in sources(*ROOMS) if any(map(reads_environment, ast.walk(tree(path))))] == []


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
