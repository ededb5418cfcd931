"""Where tasks come from: one reader for each format, all of which give the same rows."""
