--- The small trained models that ship, by name: require "tycho.zoo".
--
--     local zoo = require "tycho.zoo"
--     local model, tokenizer = zoo.load "kjv-lm", zoo.tokenizer "kjv-lm"
--     print(zoo.info("kjv-lm").page)
--
--     local painter = require("tycho.diffusion").TextToImage(zoo.load "scene-unet")
--
-- A model is a folder zoo/NAME in the layout of its kind, which tycho.hub reads as it reads any published one, with a
-- page (README.md) and checksums. recipes/zoo/NAME.lua trained it; what it reaches is in records/zoo/NAME.json.
local shelf = require "tycho.zoo.shelf"

return require "tycho.lazy" ({ names = shelf.names, path = shelf.path, load = shelf.load, tokenizer = shelf.tokenizer,
  info = shelf.info, version = shelf.version }, {
  publish = "tycho.zoo.publish",
  language = "tycho.zoo.language",
  chapters = "tycho.zoo.chapters",
  scenes = "tycho.zoo.scenes",
  judge = "tycho.zoo.judge",
  drawing_judge = "tycho.zoo.drawing_judge",
  drawings = "tycho.zoo.drawings",
  painter = "tycho.zoo.painter",
  crops = "tycho.zoo.crops",
  answerer = "tycho.zoo.answerer",
  pointing = "tycho.zoo.pointing",
  watcher = "tycho.zoo.watcher",
  describer = "tycho.zoo.describer",
  examiner = "tycho.zoo.examiner",
  captioner = "tycho.zoo.captioner",
  curriculum = "tycho.zoo.curriculum",
  arm = "tycho.zoo.arm",
  rater = "tycho.zoo.rater",
  digit_painter = "tycho.zoo.digit_painter",
  geometry = "tycho.zoo.geometry",
  canvas = "tycho.zoo.canvas",
  annotated = "tycho.zoo.annotated",
  workloads = "tycho.zoo.workloads",
  kinds = "tycho.zoo.kinds",
  clips = "tycho.zoo.clips",
  yardstick = "tycho.zoo.yardstick",
}, "tycho.zoo")
