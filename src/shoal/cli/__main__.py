"""`python -m shoal.cli`, for when the console script is not on the path."""

from shoal.cli import main

if __name__ == "__main__":
    main()
