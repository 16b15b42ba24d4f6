"""docs/config.md: every key is on it, and its example is a file that is read."""

from pydantic import BaseModel

from narrowgauge.session.config import load
from narrowgauge.session.config.load import inner_table
from narrowgauge.session.config.page import EXAMPLE, render
from narrowgauge.session.config.tables import Config


def test_the_example_is_read(tmp_path):
    path = tmp_path / "narrowgauge.toml"
    path.write_text(EXAMPLE)
    settings = load(path)
    assert settings.watch.steps == [(0, 100), (250, 250), (1000, None)]
    assert settings.dump[0].cap == 2 << 30
    assert EXAMPLE in render()


def keys(table: type[BaseModel]):
    for name, field in table.model_fields.items():
        below = inner_table(field.annotation)
        yield name, field
        if below is not None:
            yield from keys(below)


def test_every_key_is_on_the_page_and_explained():
    page = render()
    found = [name for name, _ in keys(Config)]
    assert len(found) > 30
    for name, field in keys(Config):
        if inner_table(field.annotation) is None:
            assert f"{name}` |" in page
            assert field.description
