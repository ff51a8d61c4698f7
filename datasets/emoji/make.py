#!/usr/bin/env python3
"""Writes the files of this folder from three Debian packages: python3 make.py FOLDER

FOLDER holds the packages unpacked (`dpkg-deb -x PACKAGE.deb FOLDER`), or is / where they are installed:
fonts-noto-color-emoji (the pictures), unicode-data (which emoji there are, their groups) and unicode-cldr-core (names and
keywords). fontTools is needed: Debian's python3-fonttools, or fonttools of PyPI.

A picture is what the font draws for a fully qualified emoji without a skin tone that CLDR names. Its PNG is kept byte
for byte.
"""
import gzip
import json
import os
import struct
import sys
import xml.etree.ElementTree
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGES = {
    "fonts-noto-color-emoji": "usr/share/fonts/truetype/noto/NotoColorEmoji.ttf",
    "unicode-data": "usr/share/unicode/emoji/emoji-test.txt",
    "unicode-cldr-core": "usr/share/unicode/cldr/common/annotations/en.xml",
}
LANGUAGES = ["en", "de", "fr", "es", "zh", "ja"]
SKIN = range(0x1F3FB, 0x1F400)
VARIATION = 0xFE0F


def find(root):
    paths = {}
    for package, path in PACKAGES.items():
        paths[package] = os.path.join(root, path)
        if not os.path.exists(paths[package]):
            sys.exit(f"{paths[package]} is not there: the Debian package {package} has it")
    return paths


def read_emoji(path):
    """What emoji-test.txt lists: (code points, group, subgroup)."""
    found, group, subgroup = [], None, None
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith("# group: "):
                group = line[9:].strip()
            elif line.startswith("# subgroup: "):
                subgroup = line[12:].strip()
            elif "; fully-qualified" in line:
                points = tuple(int(x, 16) for x in line.split(";")[0].split())
                if not any(p in SKIN for p in points):
                    found.append((points, group, subgroup))
    return found


def plain(points):
    return "".join(chr(p) for p in points if p != VARIATION)


def read_pictures(path):
    """A function from code points to the PNG of their glyph, None where the font has none."""
    try:
        from fontTools.ttLib import TTFont
    except ImportError:
        sys.exit("fontTools is not there: Debian's python3-fonttools or PyPI's fonttools has it")
    font = TTFont(path)
    if "CBDT" not in font:
        sys.exit(f"{path} has no pictures in PNG (no table CBDT)")
    names, strike, ligatures = font.getBestCmap(), font["CBDT"].strikeData[0], {}
    for lookup in font["GSUB"].table.LookupList.Lookup:
        for table in lookup.SubTable:
            table = getattr(table, "ExtSubTable", table)
            for first, rest in getattr(table, "ligatures", {}).items():
                for ligature in rest:
                    ligatures[(first, *ligature.Component)] = ligature.LigGlyph

    def picture(points):
        glyphs = tuple(names.get(p) for p in points if p != VARIATION)
        glyph = glyphs[0] if len(glyphs) == 1 else ligatures.get(glyphs)
        return bytes(strike[glyph].imageData) if glyph in strike else None

    return picture


def read_words(path, language):
    """By text without variation selectors: [name, keywords]. Names of sequences are in annotationsDerived."""
    words = {}
    folder = os.path.dirname(path)
    for part in "annotations", "annotationsDerived":
        tree = xml.etree.ElementTree.parse(os.path.join(folder, "..", part, language + ".xml"))
        for node in tree.iter("annotation"):
            entry = words.setdefault(plain(map(ord, node.get("cp"))), [None, []])
            if node.get("type") == "tts":
                entry[0] = node.text.strip()
            else:
                entry[1] = [word.strip() for word in node.text.split("|")]
    return words


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes), each starting at a multiple of 8."""
    header, at, body = {}, 0, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        body += data
        at += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + body)


def write_packed(path, value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed:
            packed.write(text)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    paths = find(sys.argv[1])
    picture = read_pictures(paths["fonts-noto-color-emoji"])
    emoji = []
    for points, group, subgroup in read_emoji(paths["unicode-data"]):
        png = picture(points)
        if png:
            emoji.append((points, group, subgroup, png))
        else:
            print("no picture of", " ".join(f"{p:X}" for p in points))
    words = {language: read_words(paths["unicode-cldr-core"], language) for language in LANGUAGES}
    unnamed = [entry for entry in emoji if any(not words[x].get(plain(entry[0]), [None])[0] for x in LANGUAGES)]
    print("left out, newer than the names:", *(plain(entry[0]) for entry in unnamed))
    emoji = [entry for entry in emoji if entry not in unnamed]
    offsets = [0]
    for entry in emoji:
        offsets.append(offsets[-1] + len(entry[3]))
    write_safetensors(os.path.join(HERE, "pictures.safetensors"), {
        "offsets": ("I64", [len(offsets)], struct.pack(f"<{len(offsets)}q", *offsets)),
        "png": ("U8", [offsets[-1]], b"".join(entry[3] for entry in emoji)),
    })
    write_packed(os.path.join(HERE, "index.json.gz"), {
        "codes": [" ".join(f"{p:X}" for p in points) for points, *_ in emoji],
        "groups": [group for _, group, *_ in emoji],
        "subgroups": [subgroup for _, _, subgroup, _ in emoji],
    })
    for language in LANGUAGES:
        entries = [words[language][plain(points)] for points, *_ in emoji]
        names, keywords = [entry[0] for entry in entries], [entry[1] for entry in entries]
        write_packed(os.path.join(HERE, language + ".json.gz"), {"names": names, "keywords": keywords})
    checksums = {}
    for name in sorted(["pictures.safetensors", "index.json.gz"] + [x + ".json.gz" for x in LANGUAGES]):
        with open(os.path.join(HERE, name), "rb") as file:
            data = file.read()
        checksums[name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    with open(os.path.join(HERE, "checksums.json"), "w") as file:
        json.dump(checksums, file, indent=2, sort_keys=True)
        file.write("\n")
    print(len(emoji), "pictures,", sum(entry["bytes"] for entry in checksums.values()), "bytes")


main()
