"""``python -m octavo_server``: the same as ``octavo serve``."""

import sys

from octavo_server.start import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], program="python -m octavo_server"))
