"""XMP packets: settings and labels as XML, in PNG, JPEG, WebP and MP4 files; loads no torch.

ISO 16684-1 describes the packet, Adobe's XMP specification part 3 where it lies in a file.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from stages.errors import RequestError

PNG_KEYWORD = "XML:com.adobe.xmp"
MAX_PACKET_NBYTES = 2**20
"""Of a packet that is read; the limit of texts in a PNG."""

_OURS = "urn:exeunt:xmp:1.0/"
_IPTC = "http://iptc.org/std/Iptc4xmpExt/2008-02-29/"
_SOURCE_TYPES = "http://cv.iptc.org/newscodes/digitalsourcetype/"
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_JPEG_NAME = b"http://ns.adobe.com/xap/1.0/\0"
_MP4_UUID = bytes.fromhex("be7acfcb97a942e89c71999491e3afac")
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_NO_DATA_MARKERS = (0x01, *range(0xD0, 0xD9))  # of a JPEG: they have no length
_START_OF_SCAN = 0xDA


def packet(*, settings: str = "", source_type: str = "") -> bytes:
    """A packet with what is not empty; empty if all is.

    Args:
        settings: JSON text.
        source_type: IPTC's digital source type, such as `trainedAlgorithmicMedia`.
    """
    properties = ""
    if source_type:
        uri = escape(_SOURCE_TYPES + source_type)
        properties += f"<Iptc4xmpExt:DigitalSourceType>{uri}</Iptc4xmpExt:DigitalSourceType>"
    if settings:
        properties += f"<exeunt:settings>{escape(_as_xml(settings))}</exeunt:settings>"
    if not properties:
        return b""
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>'
        f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{_RDF}">'
        f'<rdf:Description rdf:about="" xmlns:Iptc4xmpExt="{_IPTC}" xmlns:exeunt="{_OURS}">'
        f"{properties}</rdf:Description></rdf:RDF></x:xmpmeta>"
        '<?xpacket end="w"?>'
    ).encode()


def _as_xml(document: str) -> str:
    r"""JSON text without characters that XML cannot hold: they become `\u` escapes."""
    return _NO_XML.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def mp4_with_packet(mp4: bytes, xmp: bytes) -> bytes:
    """The same video with a packet behind all that it has, where no offset in it changes."""
    return mp4 + struct.pack(">I4s", 24 + len(xmp), b"uuid") + _MP4_UUID + xmp


def settings_in(path: Path) -> str | None:
    """The settings in a JPEG or a WebP, if it has any. They are untrusted.

    Raises:
        RequestError: It is neither, or its packet is no XML, too large, or has a document type.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(12)
        if start.startswith(b"\xff\xd8"):
            found = _in_jpeg(file)
        elif start.startswith(b"RIFF") and start.endswith(b"WEBP"):
            found = _in_webp(file)
        else:
            raise RequestError(f"no JPEG or WebP picture: {path}")
    if found is None:
        return None
    if len(found) > MAX_PACKET_NBYTES or b"<!DOCTYPE" in found or b"<!ENTITY" in found:
        raise RequestError(f"the XMP packet has a document type, or is too large: {path}")
    try:
        return ElementTree.fromstring(found).findtext(f".//{{{_OURS}}}settings")
    except (ElementTree.ParseError, ValueError) as error:
        raise RequestError(f"the XMP packet is no XML: {path}: {error}") from error


def _in_jpeg(file: BinaryIO) -> bytes | None:
    file.seek(2)
    while len(marker := file.read(2)) == 2 and marker[0] == 0xFF:
        if marker[1] in _NO_DATA_MARKERS:
            continue
        length = int.from_bytes(file.read(2), "big")
        if length < 2 or marker[1] == _START_OF_SCAN:
            return None
        data = file.read(length - 2)
        if marker[1] == 0xE1 and data.startswith(_JPEG_NAME):
            return data[len(_JPEG_NAME) :]
    return None


def _in_webp(file: BinaryIO) -> bytes | None:
    while len(head := file.read(8)) == 8:
        length = int.from_bytes(head[4:], "little")
        if head.startswith(b"XMP "):
            return file.read(min(length, MAX_PACKET_NBYTES + 1))
        file.seek(length + length % 2, 1)
    return None
