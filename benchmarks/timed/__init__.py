"""Plans that are timed on a GPU, beside their estimates."""
