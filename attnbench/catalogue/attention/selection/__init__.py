"""Selection: the content chooses the pairs, by hashing, clustering, sorting or a score."""
