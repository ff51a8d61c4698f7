--- Pictures of a folder that are found by words: every picture becomes a vector once, by a CLIP or SigLIP, and an index
-- file keeps these beside the pictures. Opening the folder again encodes what is new or has changed and forgets what is
-- gone.
--
--     local gallery = vlm.gallery("path/of/pictures", vlm.gallery_encoder "path/of/clip")
--     for _, found in ipairs(gallery:search("a red car", 5)) do print(found.score, found.path) end
local ty = require "tycho"
local arguments = require "tycho.arguments"
local hub = require "tycho.hub"

local nn = ty.nn
local expect = arguments.expect
local M = {}

local INDEX = ".tycho-gallery.safetensors"
local VERSION = "1" -- of the index file
local endings = { png = true, jpg = true, jpeg = true, webp = true }

-- ---- the encoder ----

--- What turns pictures and texts into vectors of one space.
---@class GalleryEncoder
---@field model Module       a CLIPModel, SiglipModel or Siglip2Model
---@field name string        that an index made by it carries
local Encoder = {}
Encoder.__index = Encoder
Encoder.__name = "GalleryEncoder"

-- An error where a processor makes other pictures than a tower with this config takes.
local function check_processor(who, path, vision, made, sizes)
  local shape, side, patch = made.shape, vision.image_size, vision.patch_size
  if vision.num_patches then -- pictures of every shape, in patches
    local values = vision.num_channels * patch * patch
    if #shape ~= 3 or shape[3] ~= values then
      arguments.fail("%s: %s: preprocessor_config.json makes %s, the model takes patches of %d values", who, path,
        #shape == 3 and ("patches of %d values"):format(shape[3]) or "no patches", values)
    end
    return
  end
  local height, width = type(side) == "table" and side[1] or side, type(side) == "table" and side[2] or side
  if #shape ~= 4 or sizes then
    arguments.fail("%s: %s: preprocessor_config.json makes %s, the model takes pictures of %d x %d", who, path,
      #shape == 4 and "tiles" or "patches", height, width)
  elseif shape[3] ~= height or shape[4] ~= width then
    arguments.fail("%s: %s: preprocessor_config.json makes pictures of %d x %d, the model takes %d x %d", who, path,
      shape[3], shape[4], height, width)
  end
end

--- The encoder of a folder with a CLIP or a SigLIP: config.json, weights, tokenizer, preprocessor_config.json. options:
-- those of hub.load (device, dtype).
---@param path string
---@param options? table
---@return GalleryEncoder
function M.encoder(path, options)
  local who = "vlm.gallery_encoder"
  expect(who, "path", path, "a string")
  local model = hub.load(path, options)
  if not model.image_features or not model.text_features then
    arguments.fail("%s: %s: expected a CLIPModel, SiglipModel or Siglip2Model, got a %s", who, path,
      getmetatable(model).__name)
  end
  model:eval()
  local process = hub.processor(path)
  check_processor(who, path, model.vision_model.config, process { ty.zeros({ 3, 8, 8 }, { dtype = "u8" }) })
  -- Two models differ in their weights, if in nothing else.
  local sum = 0
  for _, p in ipairs(model:parameters()) do sum = sum + p:detach():to("f64"):abs():sum():item() end
  return setmetatable({ model = model, path = path, process = process, tokenizer = hub.tokenizer(path),
    name = ("%s %d %.12g"):format(getmetatable(model).__name, model:count_parameters(), sum),
    room = model.text_model.config.max_position_embeddings, siglip = model.logit_bias ~= nil }, Encoder)
end

--- Unit vectors [n, width] of processed pictures f32 [n, 3, height, width], or of patches and their sizes, as the
-- processor gives both.
---@param pictures Tensor
---@param sizes? Tensor
---@return Tensor
function Encoder:pictures(pictures, sizes)
  expect("GalleryEncoder:pictures", "pictures", pictures, "a tensor")
  expect("GalleryEncoder:pictures", "sizes", sizes, "a tensor or nil")
  return ty.no_grad(function()
    local options = sizes and { sizes = sizes } or nil
    return nn.normalize(self.model:image_features(pictures:to { device = self.model:device() }, options):to "f32")
  end)
end

--- Unit vectors [n, width] of texts.
---@param texts string[]
---@return Tensor
function Encoder:texts(texts)
  expect("GalleryEncoder:texts", "texts", texts, "a list of strings")
  if #texts == 0 then arguments.fail "GalleryEncoder:texts: texts: expected at least one, got none" end
  return ty.no_grad(function()
    local rows = {}
    for i, text in ipairs(texts) do
      -- SigLIP has learnt from texts that are filled up to their whole length.
      local tokens = self.tokenizer:encode_batch({ text }, { max_length = self.room, pad_id = 0 })
      local fill = self.siglip and self.room - tokens.shape[2] or 0
      if fill > 0 then
        local pad = ty.tokenizer.fields(self.tokenizer).pad or self.model.text_model.config.pad_token_id or 1
        tokens = ty.concat({ tokens, ty.full({ 1, fill }, pad, { dtype = "i64" }) }, 1)
      end
      rows[i] = self.model:text_features(tokens:to { device = self.model:device() })
    end
    return nn.normalize(ty.concat(rows, 0):to "f32")
  end)
end

-- ---- the files ----

-- Pictures below a folder, by their paths in it, with what tells whether one has changed. Names that begin with a dot
-- are passed over, and folders that lie deeper than 32.
local function listed(folder)
  local found = {}
  local function walk(below, depth)
    for _, name in ipairs(ty.io.listdir(folder .. below)) do
      local path = below .. "/" .. name
      local info = name:sub(1, 1) ~= "." and ty.io.stat(folder .. path)
      if info and info.kind == "directory" then
        if depth < 32 then walk(path, depth + 1) end
      elseif info and endings[(name:match "%.(%w+)$" or ""):lower()] then
        found[#found + 1] = { path = path:sub(2), stamp = ("%d %.6f"):format(info.size or 0, info.mtime or 0) }
      end
    end
  end
  walk("", 1)
  table.sort(found, function(a, b) return a.path < b.path end)
  return found
end

-- Runs in a worker: processed pictures of a list of paths in one tensor, the places of those that could be read, what
-- was wrong with the others, and of pictures in patches their sizes.
local function serve(folder)
  local process = require("tycho.hub").processor(folder)
  return function(paths)
    local list, sizes, places, problems = {}, {}, {}, {}
    for i, path in ipairs(paths) do
      local ok, result, size = pcall(process, { path })
      if ok then
        list[#list + 1], sizes[#list + 1], places[#places + 1] = result, size, i
      else
        problems[i] = tostring(result)
      end
    end
    local concat = require("tycho").concat
    return #list > 0 and concat(list, 0) or false, places, problems, #sizes > 0 and concat(sizes, 0) or false
  end
end

-- ---- the gallery ----

--- A folder of pictures and their vectors.
---@class Gallery
---@field folder string
---@field paths string[]     pictures by their paths in the folder
---@field features Tensor    f32 [n, width], unit vectors, row by row; nil without pictures
---@field encoded integer    how many were encoded when it was opened
---@field problems table<string, string>  what could not be read, by its path: why
local Gallery = {}
Gallery.__index = Gallery
Gallery.__name = "Gallery"

-- Vectors that an index holds, by path: { row, stamp }; nothing where there is none of this encoder.
local function kept(path, encoder)
  if not ty.io.stat(path) then return {} end
  local ok, tensors, notes = pcall(ty.io.load_safetensors, path)
  if not ok or not notes or notes.version ~= VERSION or notes.encoder ~= encoder.name then return {} end
  local read, list = pcall(ty.io.json_decode, notes.pictures or "")
  local features = tensors.features
  if not read or type(list) ~= "table" or not features or features.ndim ~= 2 then return {} end
  if features.shape[1] ~= #list or features.dtype ~= "f32" then return {} end
  local by_path = {}
  for i, entry in ipairs(list) do
    if type(entry) ~= "table" or type(entry[1]) ~= "string" or type(entry[2]) ~= "string" then return {} end
    by_path[entry[1]] = { row = features[i - 1], stamp = entry[2] }
  end
  return by_path
end

-- Encodes the files of a list that have no row yet.
local function encode(self, files, o)
  local encoder, jobs = self.encoder, {}
  for _, file in ipairs(files) do
    if not file.row then
      local job = jobs[#jobs]
      if not job or #job >= o.batch then
        job = {}
        jobs[#jobs + 1] = job
      end
      job[#job + 1] = file
    end
  end
  local threads = {}
  for i = 1, math.min(o.workers, #jobs) do threads[i] = ty.thread.new(serve, encoder.path) end
  local ok, problem = pcall(function()
    local sent, done, total = 0, 0, 0
    for _, job in ipairs(jobs) do total = total + #job end
    local function send()
      if sent >= #jobs then return end
      sent = sent + 1
      local paths = {}
      for i, file in ipairs(jobs[sent]) do paths[i] = self.folder .. "/" .. file.path end
      threads[(sent - 1) % #threads + 1]:send(paths)
    end
    for _ = 1, 2 * #threads do send() end
    for k, job in ipairs(jobs) do
      ty.scope(function()
        local pictures, places, problems, sizes = threads[(k - 1) % #threads + 1]:receive()
        send()
        local rows = pictures and encoder:pictures(pictures, sizes or nil):to { device = "cpu" }
        for i, place in ipairs(places) do job[place].row = ty.keep(rows[i - 1]:clone()) end
        for place, why in pairs(problems) do self.problems[job[place].path] = why end
      end)
      done = done + #job
      if o.on_progress then o.on_progress(done, total) end
    end
    self.encoded = done
  end)
  for _, thread in ipairs(threads) do thread:close() end
  if not ok then error(problem, 0) end
end

--- Opens a folder of PNG, JPEG and WebP files (and folders in it): encodes what its index does not have yet, and keeps
-- the index beside the pictures where the folder can be written to. Pictures that cannot be read are left out, and said
-- in `problems`. options: batch (32 pictures at a time), workers (2 threads that read and process), keep (true),
-- on_progress(done, all).
---@param folder string
---@param encoder GalleryEncoder
---@param options? table
---@return Gallery
function M.open(folder, encoder, options)
  local who = "vlm.gallery"
  expect(who, "folder", folder, "a string")
  if getmetatable(encoder) ~= Encoder then
    arguments.fail("%s: encoder: expected one of vlm.gallery_encoder, got %s", who, arguments.describe(encoder))
  end
  local o = arguments.read(who, options, { batch = 32, workers = 2, keep = true, on_progress = arguments.none },
    { batch = "an integer >= 1", workers = "an integer in [1, 64]", on_progress = "a function" })
  local info = ty.io.stat(folder)
  if not info or info.kind ~= "directory" then arguments.fail("%s: folder: %s is no folder", who, folder) end
  local self = setmetatable({ folder = folder, encoder = encoder, paths = {}, problems = {}, encoded = 0 }, Gallery)
  local index = folder .. "/" .. INDEX
  local before, files = kept(index, encoder), listed(folder)
  local gone = 0
  for _ in pairs(before) do gone = gone + 1 end
  for _, file in ipairs(files) do
    local entry = before[file.path]
    if entry then gone = gone - 1 end
    if entry and entry.stamp == file.stamp then file.row = entry.row end
  end
  encode(self, files, o)
  local rows, list = {}, {}
  for _, file in ipairs(files) do
    if file.row then
      rows[#rows + 1], list[#list + 1] = file.row, { file.path, file.stamp }
      self.paths[#rows] = file.path
    end
  end
  if #rows > 0 then self.features = ty.keep(ty.stack(rows, 0)) end
  if o.keep and #rows > 0 and (self.encoded > 0 or gone > 0) then
    local ok, why = pcall(ty.io.save_safetensors, index, { features = self.features },
      { version = VERSION, encoder = encoder.name, pictures = ty.io.json_encode(list) })
    if not ok then self.problems[INDEX] = tostring(why) end
  end
  return self
end

local function nearest(self, vector, count)
  if not self.features then return {} end
  count = math.min(count, #self.paths)
  local scores, places = self.features:matmul(vector:to { device = self.features.device }):topk(count)
  scores, places = scores:tolist(), places:tolist()
  local found = {}
  for i = 1, count do
    found[i] = { path = self.folder .. "/" .. self.paths[places[i] + 1], score = scores[i] }
  end
  return found
end

--- The pictures that fit a text best, the best first: { path, score }, the score being the cosine. Several texts (a
-- list) count as their mean. count: 10.
---@param text string|string[]
---@param count? integer
---@return { path: string, score: number }[]
function Gallery:search(text, count)
  local who = "Gallery:search"
  expect(who, "text", text, "a string or a list of strings")
  count = expect(who, "count", count == nil and 10 or count, "an integer >= 1")
  local texts = type(text) == "string" and { text } or text
  return nearest(self, nn.normalize(self.encoder:texts(texts):mean({ 0 }, true)):select(0, 0), count)
end

--- The pictures that are most like a picture, a path or u8 [channels, h, w]: as search() gives them.
---@param picture string|Tensor
---@param count? integer
---@return { path: string, score: number }[]
function Gallery:like(picture, count)
  local who = "Gallery:like"
  expect(who, "picture", picture, "a string or a tensor")
  count = expect(who, "count", count == nil and 10 or count, "an integer >= 1")
  local vector = self.encoder:pictures(self.encoder.process { picture }):select(0, 0)
  return nearest(self, vector:to { device = "cpu" }, count)
end

return M
