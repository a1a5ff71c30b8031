"""The tasks for training, in the order shown to users, with the module of each."""

SHIPPED = {
    "recall": "recall",
    "mqar": "mqar",
    "chains": "chains",
    "permutations": "permutations",
    "copy": "copy",
    "duplication": "duplication",
    "listops": "listops_task",
    "digits": "digits",
    "text": "reviews",
    "image": "image",
    "retrieval": "retrieval",
    "pathfinder": "pathfinder",
    "contours": "contours",
    "next-byte": "next_byte",
    "detection": "detection",
    "contacts": "contacts",
}
"""Name of a task -> its module here."""
