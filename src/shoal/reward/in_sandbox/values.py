"""Values as text: between a program and its tester, and from a program to the main process."""
# mypy: ignore-errors
# Untyped on purpose: values of every type pass through, and annotations would cost each batch the import of typing.


def encoded(value, handles=None):
    """JSON of a value made of Python's own types; an object is a handle, or its repr where there are no handles."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 53 else {"i": hex(value)}
    if isinstance(value, float):
        return float(value) if value - value == 0 else {"f": float.__repr__(value)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encoded(item, handles) for item in list.__iter__(value)]
    if isinstance(value, dict):
        return {"d": [[encoded(key, handles), encoded(item, handles)] for key, item in dict.items(value)]}
    for tag, kind in (("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kind):
            return {tag: [encoded(item, handles) for item in kind.__iter__(value)]}
    if isinstance(value, bytes):
        return {"b": value.hex()}
    if isinstance(value, complex):
        return {"c": [repr(value.real), repr(value.imag)]}
    if handles is None:
        return {"r": repr(value)[:200]}
    return handles(value)


def decoded(tree, handles):
    if isinstance(tree, list):
        return [decoded(item, handles) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, value),) = tree.items()
    if tag == "d":
        return {decoded(key, handles): decoded(item, handles) for key, item in value}
    if tag in "tsz":
        return {"t": tuple, "s": set, "z": frozenset}[tag](decoded(item, handles) for item in value)
    simple = {"i": lambda text: int(text, 16), "f": float, "b": bytes.fromhex}
    if tag in simple:
        return simple[tag](value)
    if tag == "c":
        return complex(float(value[0]), float(value[1]))
    return handles(tag, value)
