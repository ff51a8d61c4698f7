--- Datasets, loaders and readers: require "tycho".data.
local datasets = require "tycho.data.dataset"

local data = { DataLoader = require("tycho.data.loader").new }
for name, value in pairs(datasets) do data[name] = value end
for name, value in pairs(require "tycho.data.readers") do data[name] = value end

return require("tycho.lazy")(data, {
  transforms = "tycho.data.transforms",
  WeightedSampler = { "tycho.data.samplers", "WeightedSampler" }, rounds = { "tycho.data.samplers", "rounds" },
  draws = { "tycho.data.samplers", "draws" }, batches = { "tycho.data.samplers", "batches" },
  DistributedSampler = { "tycho.data.samplers", "DistributedSampler" },
  stream = { "tycho.data.stream", "new" }, cache = { "tycho.data.cache", "cache" },
  jsonl = { "tycho.data.shards", "jsonl" }, shards = { "tycho.data.shards", "shards" },
  load_wav = { "tycho.data.audio", "load_wav" }, save_wav = { "tycho.data.audio", "save_wav" },
  load_audio = { "tycho.data.audio", "load_audio" }, save_flac = { "tycho.data.audio", "save_flac" },
  resample = { "tycho.data.audio", "resample" },
}, "ty.data")
