"""`python -m deepinfer.settings` prints the settings table of README.md, made from the registry."""

from deepinfer.settings.table import markdown

if __name__ == "__main__":
    print(markdown())
