"""`python -m narrowgauge`: the command, where its script is not on the path."""

from narrowgauge.cli.main import main

if __name__ == "__main__":
    main()
