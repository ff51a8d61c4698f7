#!/usr/bin/env python3
"""Writes the files of this folder and the list in README.md from packages: python3 make.py FOLDER

FOLDER holds the Debian packages lomiri-wallpapers-16.04, gcompris-qt-data and python3-scipy unpacked
(`dpkg-deb -x PACKAGE.deb FOLDER`); scikit-image and scikit-learn come from PyPI, with Pillow and NumPy.

A photograph is scaled down to at most 640 pixels on its longer side and written as JPEG of quality 92, without
subsampling of colours. One that is a JPEG of that size is kept byte for byte.
"""
import bz2
import io
import json
import os
import struct
import sys
import zlib

HERE = os.path.dirname(os.path.abspath(__file__))
LONGEST = 640
CC0, BY1, BY2, BY3, BY4 = "CC0 1.0", "CC BY 1.0", "CC BY 2.0", "CC BY 3.0", "CC BY 4.0"
PD = "public domain"

LOMIRI = "Debian lomiri-wallpapers-16.04 20.04.0-2"
GCOMPRIS = "Debian gcompris-qt-data 3.1-2"
SCIPY = "Debian python3-scipy 1.10.1-2"
SKIMAGE = "PyPI scikit-image 0.26.0"
SKLEARN = "PyPI scikit-learn 1.9.1"

commons = "https://commons.wikimedia.org/wiki/File:"
public = "http://www.public-domain-image.com"
lomiri = "its copyright file"

# name, what it shows, kind, split, package, file in it, author, licence, where they have it from or say so
PHOTOS = [
    ("astronaut", "an astronaut in an orange suit before a flag", "people", "training", SKIMAGE, "astronaut.png", "NASA",
     PD, "https://flic.kr/p/r9qvLn"),
    ("cameraman", "a man with a film camera on a tripod", "people", "held_out", SKIMAGE, "camera.png", "Lav Varshney",
     CC0, "https://github.com/scikit-image/scikit-image/issues/3927"),
    ("stairs", "a person climbing the stairs of a building", "people", "training", SCIPY, "ascent.dat", "not named", PD,
     public),
    ("cat", "the face of a cat", "animals", "held_out", SKIMAGE, "chelsea.png", "Stefan van der Walt", CC0, ""),
    ("crocodile", "a crocodile on a river bank", "animals", "training", GCOMPRIS,
     "explore_world_animals/resource/animals/crocodile", "Kmanoj", BY3,
     commons + "Marsh_Crocodiles_basking_in_the_sun.JPG"),
    ("dogs", "two dogs looking out of a wooden house", "animals", "training", LOMIRI, "friends_by_Aitzol_Berasategi.jpg",
     "Aitzol Berasategi", BY4, lomiri),
    ("moose", "a moose lying in a meadow", "animals", "held_out", GCOMPRIS,
     "explore_world_animals/resource/animals/moose", "Ryan Hagerty, U.S. Fish and Wildlife Service", PD,
     commons + "Male_Moose.jpg"),
    ("panda", "a panda beside a tree", "animals", "training", GCOMPRIS, "explore_world_animals/resource/animals/panda",
     "Aaron Logan", BY1, commons + "Lightmatter_panda.jpg"),
    ("raccoon", "a raccoon among leaves", "animals", "training", SCIPY, "face.dat", "not named", PD, public),
    ("great wall", "the Great Wall of China on a hill", "buildings", "training", GCOMPRIS,
     "categorization/resource/images/monuments/greatWall", "Hao Wei", BY2, commons + "The_Great_wall_-_by_Hao_Wei.jpg"),
    ("leaning tower", "the leaning tower of Pisa", "buildings", "held_out", GCOMPRIS,
     "categorization/resource/images/monuments/leaningTowerOfPisa", "Dan Kamminga", BY2, commons + "Torre_di_Pisa.jpg"),
    ("louvre", "the Louvre and its glass pyramid under clouds", "buildings", "training", GCOMPRIS,
     "categorization/resource/images/monuments/leMusee", "Jean-Pierre Dalbéra", BY2,
     commons + "Le_mus%C3%A9e_du_Louvre_(4750261198).jpg"),
    ("palace", "a palace lit at night", "buildings", "training", GCOMPRIS,
     "categorization/resource/images/monuments/zimniPalace", "Dezidor", BY3, commons + "Zimn%C3%AD_pal%C3%A1c_%283%29.jpg"),
    ("temple", "a Chinese temple above trees and a lake", "buildings", "held_out", SKLEARN, "china.jpg", "danielbuechele",
     BY2, "https://www.flickr.com/photos/danielbuechele/6061409035/sizes/z/in/photostream/"),
    ("windmill", "a stone windmill on six arches", "buildings", "training", GCOMPRIS,
     "categorization/resource/images/renewable/windmill", "G-Man", PD, commons + "Chesterton_Windmill.jpg"),
    ("bricks", "a wall of bricks", "textures", "training", SKIMAGE, "brick.png", "CC0Textures", CC0,
     "https://cc0textures.com/view.php?tex=Bricks25"),
    ("grass", "blades of grass", "textures", "training", SKIMAGE, "grass.png", "linolafett", CC0,
     "https://www.deviantart.com/linolafett/art/Grass-01-434853879"),
    ("gravel", "gravel", "textures", "held_out", SKIMAGE, "gravel.png", "CC0Textures", CC0,
     "https://cc0textures.com/view.php?tex=Gravel04"),
    ("dandelions", "dandelions in a meadow in evening light", "plants", "training", LOMIRI,
     "seeding_by_Clements_Engelhardt.jpg", "Clemens Engelhardt", CC0, lomiri),
    ("flower", "an orange dahlia", "plants", "training", SKLEARN, "flower.jpg", "vultilion", BY2,
     "https://www.flickr.com/photos/vultilion/6056698931/sizes/z/in/photostream/"),
    ("meadow", "a green meadow before a mountain", "landscapes", "training", LOMIRI,
     "aitzgorri_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", BY4, lomiri),
    ("mountains", "a path in high mountains", "landscapes", "training", LOMIRI,
     "picosdeeuropa_by_Aitzol_Berasategi.jpg", "Aitzol Berasategi", BY4, lomiri),
    ("stream", "a stream in a forest", "landscapes", "held_out", LOMIRI, "life_by_Aitzol_Berasategi.jpg",
     "Aitzol Berasategi", BY4, lomiri),
    ("sunset", "the sun setting behind hills", "landscapes", "training", LOMIRI, "sunset_by_Aitzol_Berasategi.jpg",
     "Aitzol Berasategi", BY4, lomiri),
    ("brushes", "brushes full of paint", "things", "training", LOMIRI, "Picture_1A_by_freespace.jpg",
     'Trevor "Freespace"', BY4, lomiri),
    ("clock", "a clock, blurred by the motion of the camera", "things", "training", SKIMAGE, "clock_motion.png",
     "Stefan van der Walt", PD, ""),
    ("coffee", "a cup of coffee on a wooden table", "things", "training", SKIMAGE, "coffee.png",
     "Rachel Michetti, Pikolo Espresso Bar", CC0, ""),
    ("coins", "four rows of old coins", "things", "training", SKIMAGE, "coins.png", "Brooklyn Museum",
     "no known copyright restrictions", "https://www.brooklynmuseum.org/opencollection/archives/image/51611"),
    ("fig", "half a fig in a red bowl", "things", "held_out", LOMIRI, "Picture_0B_by_freespace.jpg",
     'Trevor "Freespace"', BY4, lomiri),
    ("room", "a living room with a drum and a bottle of wine", "things", "training", LOMIRI, "Wine_by_Jakkub_Mede.jpg",
     "Jakub Mede", BY4, lomiri),
    ("text", "handwriting on paper, photographed from the side", "text", "training", SKIMAGE, "text.png", "not named", PD,
     "https://en.wikipedia.org/wiki/File:Corner.png"),
    ("galaxies", "galaxies in deep space", "science", "training", SKIMAGE, "hubble_deep_field.jpg", "NASA", PD,
     "http://hubblesite.org/newscenter/archive/releases/2012/37/image/a/"),
    ("retina", "the retina of an eye", "science", "training", SKIMAGE, "retina.jpg", "Mikael Häggström", CC0,
     "https://commons.wikimedia.org/wiki/File:Fundus_photograph_of_normal_left_eye.jpg"),
    ("rocket", "a rocket on its launch pad at night", "science", "held_out", SKIMAGE, "rocket.jpg", "SpaceX", PD,
     "https://www.flickr.com/photos/spacexphotos/16511594820/in/photostream/"),
]


def missing(what):
    sys.exit(f"{what}; the head of make.py says which packages have the photographs")


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        missing(f"{error.filename}: {error.strerror}")


def read_rcc(path, wanted):
    """A file of a Qt resource (rcc) by its path without folders before it and ending, as it is stored."""
    data = read(path)
    version, tree, content, names = struct.unpack(">4I", data[4:20])
    size = 22 if version >= 2 else 14

    def find(node, above):
        at = tree + node * size
        name_at, flags = struct.unpack(">IH", data[at:at + 6])
        length = struct.unpack(">H", data[names + name_at:names + name_at + 2])[0]
        name = data[names + name_at + 6:names + name_at + 6 + 2 * length].decode("utf-16-be") if node else ""
        path = above + "/" + name
        if not flags & 2:
            start = content + struct.unpack(">I", data[at + 10:at + 14])[0]
            found = path.rsplit(".", 1)[0].endswith("/" + wanted)
            return data[start + 4:start + 4 + struct.unpack(">I", data[start:start + 4])[0]] if found else None
        count, first = struct.unpack(">II", data[at + 6:at + 14])
        for child in range(first, first + count):
            result = find(child, path)
            if result:
                return result
        return None

    return find(0, "") or sys.exit(f"{path} has no {wanted}")


def original(root, package, file):
    """The bytes of a picture file, or an array of pixels where SciPy has no more."""
    if package == LOMIRI:
        return read(os.path.join(root, "usr/share/backgrounds", file))
    if package == GCOMPRIS:
        return read_rcc(os.path.join(root, "usr/share/gcompris-qt/rcc", file.split("/")[0] + ".rcc"), file)
    if package == SCIPY:
        import numpy
        data = read(os.path.join(root, "usr/lib/python3/dist-packages/scipy/misc", file))
        if file == "face.dat":
            return numpy.frombuffer(bz2.decompress(data), dtype="uint8").reshape(768, 1024, 3)
        import pickle
        return numpy.array(pickle.loads(data), dtype="uint8")
    if package == SKIMAGE:
        import skimage.data
        return read(os.path.join(os.path.dirname(skimage.data.__file__), file))
    import sklearn.datasets
    return read(os.path.join(os.path.dirname(sklearn.datasets.__file__), "images", file))


def small(data):
    from PIL import Image, ImageOps
    image = Image.open(io.BytesIO(data)) if isinstance(data, bytes) else Image.fromarray(data)
    if isinstance(data, bytes) and image.format == "JPEG" and max(image.size) <= LONGEST:
        return data, image.size
    image = ImageOps.exif_transpose(image)
    image = image.convert("L" if image.mode in ("L", "I;16", "1") else "RGB")
    scale = LONGEST / max(image.size)
    if scale < 1:
        image = image.resize(tuple(round(side * scale) for side in image.size), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=92, subsampling=0, optimize=True)
    return file.getvalue(), image.size


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    checksums, entries, rows = {}, [], []

    def write(name, data):
        with open(os.path.join(HERE, name), "wb") as file:
            file.write(data)
        checksums[name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}

    for name, caption, kind, split, package, source, author, licence, where in PHOTOS:
        file = name.replace(" ", "_") + ".jpg"
        try:
            data, (width, height) = small(original(sys.argv[1], package, source))
        except ImportError as error:
            missing(error)
        write(file, data)
        entries.append({"name": name, "file": file, "caption": caption, "kind": kind, "split": split, "author": author,
                        "licence": licence, "source": f"{package}: {source}", "height": height, "width": width})
        rows.append(f"| `{file}` | {width} x {height} | {split} | {author} | {licence} | {package}: `{source}` | {where} |")
    write("photos.json", (json.dumps(entries, ensure_ascii=False, indent=1) + "\n").encode())
    with open(os.path.join(HERE, "checksums.json"), "w") as file:
        json.dump(checksums, file, indent=2, sort_keys=True)
        file.write("\n")
    page = os.path.join(HERE, "README.md")
    with open(page, encoding="utf-8") as file:
        head = file.read().split("## The photographs")[0]
    with open(page, "w", encoding="utf-8") as file:
        file.write(head + "## The photographs\n\n| file | size | split | author | licence | from | said at |\n"
                   "|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n")
    print(len(entries), "photographs,", sum(entry["bytes"] for entry in checksums.values()), "bytes")


main()
