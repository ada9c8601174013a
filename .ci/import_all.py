"""Import every module of the packages, so that an undeclared dependency shows in a bare environment."""

import importlib
import pkgutil
import sys

PACKAGES = ["jaxserve", "pallas_kernels", "jaxserve_checkpoints", "jaxserve_server"]


def main() -> int:
    count, failures = 0, []
    for root in PACKAGES:
        package = importlib.import_module(root)
        names = [m.name for m in pkgutil.walk_packages(package.__path__, prefix=f"{root}.")]
        for name in [root, *names]:
            if name.endswith(".__main__"):
                continue  # importing it would run the command
            try:
                importlib.import_module(name)
            except Exception as error:  # whatever stops one module, the others are tried too
                failures.append(f"{name}: {type(error).__name__}: {error}")
            count += 1
    print(f"imported {count} modules with the run-time dependencies only")
    for line in failures:
        print(f"cannot import {line}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
