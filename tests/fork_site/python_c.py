"""What `python -c` runs, to be forked: the text is the first argument."""

import sys

if __name__ == "__main__":
    sys.path[0] = ""
    _, text, *others = sys.argv
    sys.argv = ["-c", *others]
    exec(compile(text, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
