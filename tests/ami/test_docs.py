"""The table that people read is that of the flavours."""

from pathlib import Path

import pytest

from ami import __main__ as command


def test_the_table_of_roles_and_flavours_is_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    assert capsys.readouterr().out in (Path(__file__).parents[2] / "docs" / "images.md").read_text()


def test_one_flavour_is_shown_with_its_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["pcluster-gpu"]) == 0
    assert "toolkit: '13.0'" in capsys.readouterr().out
    assert command.main(["nothing"]) == 2
    assert "there is no flavour 'nothing'" in capsys.readouterr().err
