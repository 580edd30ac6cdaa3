"""``python -m octavo.cli``: the same as ``octavo``, where scripts are not on PATH."""

from octavo.cli.main import run

if __name__ == "__main__":
    run()
