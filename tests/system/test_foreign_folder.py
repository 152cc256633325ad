"""Folders that somebody else has made are read within bounds, whatever is in them."""

import hashlib
import os

import pytest

from proxima.system import foreign_folder
from proxima.system.foreign_folder import ForeignFileError, ForeignFolder, bounded_lines, file_sha256, read_file


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "task"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("text")
    (folder / "sub" / "b").write_text("more")
    (tmp_path / "secret").write_text("secret")
    return folder


def test_links_inside_are_followed(folder):
    (folder / "link").symlink_to("sub/b")
    assert ForeignFolder(folder).text("link") == "more"


@pytest.mark.parametrize("target", ["../secret", "/etc/passwd", "sub/../../secret"])
def test_a_link_that_leaves_is_refused(folder, target):
    (folder / "link").symlink_to(target)
    with pytest.raises(ForeignFileError, match="leaves the folder"):
        ForeignFolder(folder).read("link")


def test_a_folder_that_is_a_link_hides_no_way_out(folder):
    (folder / "out").symlink_to("..")
    with pytest.raises(ForeignFileError, match="leaves the folder"):
        ForeignFolder(folder).read("out/secret")


def test_what_is_no_regular_file_is_refused_without_waiting(folder):
    os.mkfifo(folder / "pipe")
    for name in ("pipe", "sub", "nothing", "a\0b"):
        with pytest.raises(ForeignFileError):
            ForeignFolder(folder).read(name)
    with pytest.raises(ForeignFileError, match="neither a file nor a folder"):
        ForeignFolder(folder).digest()


def test_size_number_and_depth_have_bounds(folder, monkeypatch):
    with open(folder / "sparse", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ForeignFileError, match="more than 1,048,576 bytes"):
        ForeignFolder(folder).read("sparse")
    with pytest.raises(ForeignFileError, match="bytes"):
        ForeignFolder(folder).digest()
    (folder / "sparse").unlink()
    monkeypatch.setattr(foreign_folder, "MOST_FILES", 2)
    with pytest.raises(ForeignFileError, match="more than 2 files"):
        ForeignFolder(folder).names()
    monkeypatch.setattr(foreign_folder, "MOST_FILES", 100)
    monkeypatch.setattr(foreign_folder, "MOST_DEPTH", 0)
    with pytest.raises(ForeignFileError, match="more than 0 folders"):
        ForeignFolder(folder).names()


def test_the_digest_is_of_names_modes_and_contents(folder):
    expected = hashlib.sha256()
    for name in ("a", "sub/b"):
        facts = (folder / name).stat()
        expected.update(f"{name} {facts.st_mode:o} {facts.st_size}\n".encode() + (folder / name).read_bytes())
    assert ForeignFolder(folder).digest() == expected.hexdigest()[:24]
    (folder / "link").symlink_to("/etc/hostname")
    assert ForeignFolder(folder).digest() != expected.hexdigest()[:24]


def test_a_copy_follows_no_link(folder, tmp_path):
    (folder / "link").symlink_to("../secret")
    (folder / "a").chmod(0o700)
    target = tmp_path / "copy"
    target.mkdir()
    ForeignFolder(folder).copy(target)
    assert (target / "link").is_symlink() and (target / "sub" / "b").read_text() == "more"
    assert (target / "a").stat().st_mode & 0o777 == 0o744


def test_a_file_is_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_folder, "PART", 3)
    file = tmp_path / "script.py"
    file.write_bytes(b"0123456789\nmore\n")
    assert file_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    assert read_file(file) == file.read_bytes() == read_file(file, 16)
    assert list(bounded_lines(file, 11)) == ["0123456789\n", "more\n"]
    with pytest.raises(ForeignFileError, match="'script.py' has more than 15 bytes"):
        read_file(file, 15)
    with pytest.raises(ForeignFileError, match="'script.py' has a line of more than 10 bytes"):
        list(bounded_lines(file, 10))


def test_a_line_that_is_not_utf8(tmp_path):
    (tmp_path / "rows").write_bytes(b"a\n\xff\n")
    lines = bounded_lines(tmp_path / "rows")
    assert next(lines) == "a\n"
    with pytest.raises(ForeignFileError, match="'rows' is not UTF-8"):
        next(lines)


def test_a_link_of_the_users_is_followed(folder):
    link = folder.parent / "link"
    link.symlink_to("task/a")
    assert read_file(link) == b"text" and file_sha256(link) == file_sha256(folder / "a")


@pytest.mark.parametrize("read", [read_file, file_sha256, lambda path: list(bounded_lines(path))])
def test_a_pipe_and_a_device_are_no_file(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ForeignFileError, match=f"'{name}' is not a regular file"):
            read(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
