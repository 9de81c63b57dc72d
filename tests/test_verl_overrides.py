"""Every method of verl's that this package overrides, with the signature that it has in verl 0.9.1.

An upgrade of verl changes a line of ``golden/verl_overrides.txt`` where it changes one of them.
After reading the new code of verl, write the file again: ``python tests/test_verl_overrides.py``.
"""

import importlib
import inspect
from pathlib import Path

CONTRACT = Path(__file__).parent / "golden" / "verl_overrides.txt"
MODULES = (
    *(f"core.{name}" for name in ("agent_loop", "trainer", "trajectory")),
    *(f"backends.{name}" for name in ("cpu_platform", "cpu_rollout", "engines")),
)


def overridden() -> list[str]:
    """A line for each method: ours, verl's, and verl's signature."""
    lines = []
    for name in MODULES:
        module = importlib.import_module(f"medserl_agentloop.{name}")
        for ours in vars(module).values():
            if not (inspect.isclass(ours) and ours.__module__ == module.__name__):
                continue
            for method in (
                name
                for name, value in vars(ours).items()
                if inspect.isroutine(getattr(ours, name, value))
            ):
                bases = (base for base in ours.__mro__[1:] if base.__module__.startswith("verl."))
                if base := next((base for base in bases if method in vars(base)), None):
                    parameters = inspect.signature(getattr(base, method)).parameters.values()
                    names = inspect.Signature(
                        [each.replace(annotation=each.empty) for each in parameters]
                    )
                    lines.append(
                        f"{name} {ours.__name__}.{method} <- "
                        f"{base.__module__}.{base.__name__}{names}"
                    )
    return sorted(lines)


def test_overridden_methods_of_verl_are_those_of_the_pinned_version() -> None:
    assert "\n".join(overridden()) + "\n" == CONTRACT.read_text(encoding="utf-8")


if __name__ == "__main__":
    CONTRACT.write_text("\n".join(overridden()) + "\n", encoding="utf-8")
