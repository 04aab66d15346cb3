"""Makes `python -m steadytorch` run the command `steady`."""

from steadytorch.cli import main

if __name__ == "__main__":
    main()
