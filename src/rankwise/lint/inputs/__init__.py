"""From files to pieces of code: which files, which bytes, which cells and fences."""
