#!/usr/bin/env python3
"""Writes kjv.txt.gz from the Debian packages bible-kjv and bible-kjv-text: python3 make.py [PATH of the program bible]

Books' names in full at the head of each chapter, a verse on each line without its number, an empty line between chapters.
"""
import gzip
import os
import re
import subprocess
import sys

BOOKS = """Genesis Exodus Leviticus Numbers Deuteronomy Joshua Judges Ruth 1_Samuel 2_Samuel 1_Kings 2_Kings 1_Chronicles
2_Chronicles Ezra Nehemiah Esther Job Psalm Proverbs Ecclesiastes Song_of_Solomon Isaiah Jeremiah Lamentations Ezekiel
Daniel Hosea Joel Amos Obadiah Jonah Micah Nahum Habakkuk Zephaniah Haggai Zechariah Malachi Matthew Mark Luke John Acts
Romans 1_Corinthians 2_Corinthians Galatians Ephesians Philippians Colossians 1_Thessalonians 2_Thessalonians 1_Timothy
2_Timothy Titus Philemon Hebrews James 1_Peter 2_Peter 1_John 2_John 3_John Jude Revelation""".split()


def main():
    program = sys.argv[1] if len(sys.argv) > 1 else "bible"
    try:
        lines = subprocess.run([program, "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True,
                               stdin=subprocess.DEVNULL).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}: the Debian packages bible-kjv and bible-kjv-text have the program and the text")
    chapters, short, seen = [], None, -1
    for line in lines:
        match = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)$", line)
        if not match:
            sys.exit(f"not a verse: {line!r}")
        book, chapter, verse, text = match.groups()
        if book != short:
            short, seen = book, seen + 1
        if verse == "1":
            chapters.append([f"{BOOKS[seen].replace('_', ' ')} {chapter}"])
        chapters[-1].append(text)
    if seen != 65 or len(chapters) != 1189 or sum(len(c) - 1 for c in chapters) != 31102:
        sys.exit("the book has 66 books, 1,189 chapters and 31,102 verses; this one has not")
    text = "\n".join("\n".join(chapter) + "\n" for chapter in chapters)
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "kjv.txt.gz"), "wb") as file:
        with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=file, mtime=0) as packed:
            packed.write(text.encode("ascii"))


main()
