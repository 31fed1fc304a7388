import deltasync
from deltasync import errors


def test_the_public_names() -> None:
    assert deltasync.__all__ == sorted(deltasync.__all__)
    assert set(deltasync.__all__) >= {"diff", "apply", "inspect", "digest", "StateDigest", "__version__"}
    assert all(hasattr(deltasync, name) for name in deltasync.__all__)
    assert callable(deltasync.apply), "the function, not the module of that name"


def test_every_error_is_public_and_has_its_own_kind() -> None:
    found = {n: e for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)}
    assert found.keys() <= set(deltasync.__all__)
    assert len({e.kind for e in found.values()}) == len(found)
