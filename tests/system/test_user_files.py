import pytest

from proxima.system import user_files
from proxima.system.user_files import read_text


def test_what_is_no_text_file_is_refused_with_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(user_files, "LARGEST", 4)
    (tmp_path / "large").write_text("12345")
    for path, reason in ((tmp_path / "large", "File too large"), (tmp_path / "none", "No such file")):
        with pytest.raises(OSError, match=reason) as caught:
            read_text(path)
        assert caught.value.filename == str(path)
    with pytest.raises(OSError, match="a device, not a file"):
        read_text(tmp_path.joinpath("/dev/zero"))
    (tmp_path / "small").write_bytes(b"1\r\n2")
    assert read_text(tmp_path / "small") == "1\n2"
