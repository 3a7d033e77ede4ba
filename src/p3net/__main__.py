"""`python -m p3net`, which is also how torchrun starts it."""

from p3net.app.cli import main

if __name__ == "__main__":
    main()
