"""The check as it runs: of a piece, of a file, of many; what is kept, silenced, chosen and mended."""
