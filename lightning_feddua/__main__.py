import sys

from lightning_feddua.cli import main

if __name__ == "__main__":
    sys.exit(main())
