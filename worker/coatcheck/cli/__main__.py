"""`python -m coatcheck.cli`, where the console script is not on the path."""

from coatcheck.cli import main

if __name__ == "__main__":
    main(prog_name="coatcheck")
