--- Samples of four modalities for one model: reports that are read, projections, slices of volumes and clips of moving
-- things, with questions about each; what is seen of them are features of scene-resnet. What vlm.hulu learns from.
-- Volumes are synthetic phantoms: nothing here is a medical claim.
--
--     local network = zoo.load "scene-resnet"
--     local set = zoo.examiner.samples(network, "training", 600)       -- set.text, set.picture, set.volume, set.video
local ty = require "tycho"
local arguments = require "tycho.arguments"
local datasets = require "tycho.datasets"
local vlm = require "tycho.vlm"

local expect = arguments.expect
local facts, hulu = datasets.volumes.facts, vlm.hulu
local M = {}

--- The modalities, in their order.
M.kinds = { "text", "picture", "volume", "video" }

local SIDE = 32 -- pixels of a frame's side

local laws = { constant = "it slides", gravity = "it falls", bounce = "it bounces", spin = "it spins",
  approach = "it comes closer" }

--- Features [f, 8, 8, width] of frames [f, 1 or 3, 32, 32] of about -1 to 1: those of a late stage beside those of an
-- early one, which is sharper. network: a ResNet as scene-resnet is.
---@param network Module
---@param frames Tensor
---@return Tensor
function M.encode(network, frames)
  local who = "zoo.examiner.encode"
  expect(who, "network", network, "a module")
  expect(who, "frames", frames, "a tensor")
  local shape = frames.shape
  if #shape ~= 4 or shape[2] ~= 1 and shape[2] ~= 3 or shape[3] ~= SIDE or shape[4] ~= SIDE then
    arguments.fail("%s: frames: expected [f, 1 or 3, %d, %d], got %s", who, SIDE, SIDE, arguments.describe(frames))
  end
  if not network.layer3 then
    arguments.fail("%s: network: expected a residual network, got %s", who, arguments.describe(network))
  end
  local training = network.training
  network:eval()
  frames = frames:clamp(-1, 1):expand(shape[1], 3, SIDE, SIDE)
  local features = vlm.embed(shape[1], function(start, rows)
    local x = network.bn1(network.conv1(frames:narrow(0, start, rows):to { device = network.conv1.weight.device }))
    x = network.layer1(x:relu())
    local late = network.layer3(network.layer2(x))
    local early = ty.adaptive_avg_pool2d(x, { late.shape[3], late.shape[4] })
    return ty.concat({ late, early }, 1):permute(0, 2, 3, 1)
  end, 32)
  network:train(training)
  return features
end

--- Slices [f, 1, 32, 32] of a volume [1, d, h, w] of datasets.volumes.studies, from front to back, each the mean of
-- `every` of them.
---@param volume Tensor
---@param every? integer
---@return Tensor
function M.slices(volume, every)
  local who = "zoo.examiner.slices"
  expect(who, "volume", volume, "a tensor")
  every = every or 2
  expect(who, "every", every, "an integer >= 1")
  local shape = volume.shape
  if #shape ~= 4 or shape[1] ~= 1 or shape[2] ~= SIDE or shape[4] > SIDE or shape[3] < every then
    arguments.fail("%s: volume: expected [1, %d, at least %d, at most %d], got %s", who, SIDE, every, SIDE,
      arguments.describe(volume))
  end
  local x = ty.avg_pool3d(volume:permute(0, 2, 1, 3):unsqueeze(0), { every, 1, 1 }, { every, 1, 1 })
  local room = SIDE - shape[4]
  return ty.pad(x:squeeze(0):transpose(0, 1), { room // 2, room - room // 2 }, "constant", -1)
end

--- A clip's frames u8 [f, 3, 32, 32] as encode() and hulu.see() take them.
---@param video Tensor
---@return Tensor
function M.frames(video)
  expect("zoo.examiner.frames", "video", video, "a tensor")
  return video:to "f32" / 127.5 - 1
end

-- What a projection can show: soft tissue in soft tissue leaves no trace in it.
local function visible(f) return f.kind == "calcification" or f.organ ~= "liver" and f.organ ~= "spleen" end

local defaults = { seed = 0, frames = 8, every = 2, slices_threshold = 0.4, clips_threshold = 0.02 }
local takes = { seed = "an integer", frames = "an integer >= 1", every = "an integer >= 1",
  slices_threshold = "a number >= 0", clips_threshold = "a number >= 0" }

--- Samples of `count` reports, projections, volumes and clips of a split, as hulu.pack() takes them, by modality; under
-- `whole` the same of which no place was left out. options: seed (0), frames (8, of a clip), every (2: slices of which
-- the mean is seen), slices_threshold (0.4) and clips_threshold (0.02): the change of a place that keeps it.
---@param network Module
---@param split string
---@param count integer
---@param options? table
---@return table<string, table[]>
function M.samples(network, split, count, options)
  local who = "zoo.examiner.samples"
  expect(who, "network", network, "a module")
  expect(who, "split", split, "a string")
  expect(who, "count", count, "an integer >= 1")
  local o = arguments.read(who, options, defaults, takes)
  local result = { whole = {} }
  for _, kind in ipairs(M.kinds) do result[kind], result.whole[kind] = {}, {} end
  local function add(kind, questions, frames, threshold, before)
    local features = frames and M.encode(network, frames)
    for _, whole in ipairs { false, true } do
      local seen = frames and hulu.see(frames, features, { threshold = whole and 0 or threshold })
      for _, pair in ipairs(questions) do
        table.insert((whole and result.whole or result)[kind], { seen = seen, kind = kind, answer = pair[2],
          question = (before or "") .. pair[1] })
      end
    end
  end
  local drawn = { split = split, seed = o.seed, count = count, findings = { 1, 3 }, frontal = true }
  local scans = datasets.volumes.studies(drawn)
  -- Reports that are read are those of other studies.
  drawn.first, drawn.volumes, drawn.frontal = count, false, false
  local texts = datasets.volumes.studies(drawn)
  local clips = datasets.load("clips", { split = split, seed = o.seed, frames = o.frames, size = SIDE,
    fields = { "video", "law" } })
  for i = 1, count do
    local list = scans.findings[i]
    add("text", facts.questions(texts.findings[i], { first = i }), nil, nil, texts.reports[i] .. "\n ")
    add("picture", facts.questions(list, { first = i, shown = visible }), scans.frontal:narrow(0, i - 1, 1), 0)
    add("volume", facts.questions(list, { first = i }), M.slices(scans.volumes:select(0, i - 1), o.every),
      o.slices_threshold)
    local clip = clips:get(i - 1)
    add("video", { { "how does it move?", laws[datasets.clips.laws[clip.law:item() + 1]] } }, M.frames(clip.video),
      o.clips_threshold)
  end
  return result
end

--- All samples of a set of samples() in one list, modality by modality.
---@param set table<string, table[]>
---@return table[]
function M.joined(set)
  expect("zoo.examiner.joined", "set", set, "a table")
  local list = {}
  for _, kind in ipairs(M.kinds) do table.move(set[kind] or {}, 1, #(set[kind] or {}), #list + 1, list) end
  return list
end

--- Tokens that samples see, and those that they would if no place had been left out.
---@param samples table[]
---@return integer kept
---@return integer all
function M.tokens(samples)
  expect("zoo.examiner.tokens", "samples", samples, "a list of tables")
  local kept, all = 0, 0
  for _, sample in ipairs(samples) do
    if sample.seen then kept, all = kept + sample.seen.positions.shape[1], all + sample.seen.length end
  end
  return kept, all
end

--- Frames [f, 1 or 3, 32, 32] as pictures of 0 to 1, [f, 3, 32, 32], dark where hulu.see() left places out.
---@param frames Tensor
---@param kept Tensor  bool [f, rows, columns], of hulu.see()
---@return Tensor
function M.shaded(frames, kept)
  expect("zoo.examiner.shaded", "frames", frames, "a tensor")
  expect("zoo.examiner.shaded", "kept", kept, "a tensor")
  local shape = frames.shape
  if #shape ~= 4 or kept.ndim ~= 3 or kept.shape[1] ~= shape[1] then
    arguments.fail("zoo.examiner.shaded: expected frames [f, c, h, w] and kept [f, rows, columns], got %s and %s",
      arguments.describe(frames), arguments.describe(kept))
  end
  local mask = ty.interpolate(kept:to("f32"):unsqueeze(1), { shape[3], shape[4] }, 0, "nearest")
  local x = frames:expand(shape[1], 3, shape[3], shape[4]):clamp(-1, 1) * 0.5 + 0.5
  return x * (mask * 0.75 + 0.25)
end

return M
