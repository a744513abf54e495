"""Takes the episode files out of a zip that came from elsewhere."""

import shutil
import stat
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from agentic_ring.errors import DataError
from agentic_ring.files import replacing
from agentic_ring.progress import progress

_BLOCK_BYTES = 1 << 20


def unpack_episodes(archive: Path, buffer: Path) -> int:
    """Unpacks every ``.npz`` of ``archive`` into the folder ``buffer`` and returns their number.

    Folders within the zip do not matter, other files (ExoRL's ``video``) stay in it. Episodes that are
    there already, byte for byte, are not written again.

    Raises:
      DataError: it is no zip, is damaged, holds no episode, or a member that would lie outside its
        folder, is a link, is encrypted, or has the name of another. Nothing is unpacked but for a
        damaged member, whose predecessors are there.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = _episodes(archive, opened.infolist())
            with progress(f"unpacking {archive.name}", len(members)) as advance:
                for number, (name, member) in enumerate(members.items(), start=1):
                    if not _is_there(buffer / name, member):
                        _unpack(opened, member, buffer / name)
                    advance(number, "")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(f"{archive} is no readable zip ({error}); remove it and download it again") from error
    return len(members)


def _episodes(archive: Path, members: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """The episode files by their name, after a look at all members."""
    episodes: dict[str, zipfile.ZipInfo] = {}
    for member in members:
        path = PurePosixPath(member.filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in member.filename:
            raise DataError(f"{archive} holds {member.filename!r}, a path outside its folder; it is not used")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DataError(f"{archive} holds {member.filename!r}, a link; it is not used")
        if path.suffix != ".npz" or member.is_dir():
            continue
        if member.flag_bits & 1:
            raise DataError(f"{archive} is encrypted ({member.filename!r}); decrypt it first")
        if path.name in episodes:
            raise DataError(f"{archive} holds two files of the name {path.name}; it is not used")
        episodes[path.name] = member
    if not episodes:
        raise DataError(f"{archive} holds no .npz among its {len(members)} members, so no episodes")
    return episodes


def _unpack(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> None:
    with replacing(path) as beside, beside.open("wb") as file, archive.open(member) as source:
        shutil.copyfileobj(source, file, _BLOCK_BYTES)  # zipfile compares the CRC at the end


def _is_there(path: Path, member: zipfile.ZipInfo) -> bool:
    if not path.exists() or path.stat().st_size != member.file_size:
        return False
    return zlib.crc32(path.read_bytes()) == member.CRC
