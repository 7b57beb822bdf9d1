"""Whether a product and a sum become one rounding is said at every launch: Triton's own choice has changed
from one version to the next, and with it the last bits of every result."""

import ast
from collections.abc import Iterator
from pathlib import Path

import ostinato.kernels

ROOT = Path(ostinato.kernels.__file__).parent
OPTION = "enable_fp_fusion"


def jitted(tree: ast.Module) -> set[str]:
    """Names of Triton kernels in a file, and of those it imports."""
    found = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def launches(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Calls of the form `kernel[grid](...)`, each with the function that it is in."""
    kernels = jitted(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            kernel = call.func.value if isinstance(call.func, ast.Subscript) else None
            if isinstance(kernel, ast.Name) and kernel.id in kernels:
                yield function, call


def says_it(function: ast.FunctionDef, call: ast.Call) -> bool:
    """Among its keywords, or in a dictionary of the function that is passed on."""
    if any(keyword.arg == OPTION for keyword in call.keywords):
        return True
    passed = {keyword.value.id for keyword in call.keywords if isinstance(keyword.value, ast.Name)}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            keys = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if OPTION in keys and names & passed:
                return True
    return False


def test_every_launch_says_whether_to_fuse() -> None:
    found, silent = 0, []
    for file in sorted(ROOT.rglob("*.py")):
        for function, call in launches(ast.parse(file.read_text())):
            found += 1
            if not says_it(function, call):
                silent.append(f"{file.relative_to(ROOT)}:{call.lineno} {ast.unparse(call.func)}")
    assert found > 15, "launches look different now"
    assert silent == []
