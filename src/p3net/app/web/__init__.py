"""The page of `p3net serve`: count, mark points, train."""
