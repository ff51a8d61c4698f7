--- Emoji: the pictures of Noto Color Emoji with their names and keywords in six languages. Its page,
-- datasets/emoji/README.md, says where they are from.
--
--     local set = datasets.load("emoji", { size = 64 })
--     local item = set:get(0)   -- { image = u8 [4, 64, 64], name = "grinning face", keywords = { "face", ... }, ... }
local ty = require "tycho"
local arguments = require "tycho.arguments"
local random = require "tycho.datasets.random"

local M = {}

local languages = { "en", "de", "fr", "es", "zh", "ja" }

-- ---- what ships ----

local function path(file) return ty.data.shipped("emoji/" .. file) end

local index
local function read_index()
  index = index or ty.io.json_decode(ty.io.read(path "index.json.gz"))
  return index
end

local words = {} -- by language: { names = list, keywords = list of lists }
local function read_words(language)
  words[language] = words[language] or ty.io.json_decode(ty.io.read(path(language .. ".json.gz")))
  return words[language]
end

-- ---- pictures ----

local packed -- PNG files one after the other, and where each begins
local function read_packed()
  if not packed then
    local file = ty.io.load_safetensors(path "pictures.safetensors", { mmap = true })
    packed = { png = ty.keep(file.png), offsets = file.offsets:tolist() }
  end
  return packed
end

-- Picture i as u8 [4, 128, 128]. The font's pictures are 136 wide, with nothing in the four columns at each side.
local function decode(i)
  local from, to = read_packed().offsets[i + 1], read_packed().offsets[i + 2]
  local bytes = ty.io.to_bytes(packed.png:narrow(0, from, to - from))
  return ty.io.decode_image(bytes, { channels = 4 }):narrow(2, 4, 128)
end

-- Half as large: the mean of each 2 x 2, colours weighted by their alpha, rounded half up. All numbers are below 2^24
-- and all quotients further from an integer than f32 rounds, so that this is integer arithmetic: the same everywhere.
local function halve(picture)
  local alpha = picture:narrow(0, 3, 1):to "f32"
  local weighted = ty.concat({ picture:narrow(0, 0, 3):to "f32" * alpha, alpha }, 0)
  local sum = weighted:unsqueeze(0):avg_pool2d(2):squeeze(0) * 4
  alpha = sum:narrow(0, 3, 1)
  local colour = ((sum:narrow(0, 0, 3) + alpha * 0.5) / alpha:clamp(1)):floor()
  return ty.concat({ colour, ((alpha + 2) * 0.25):floor() }, 0):to "u8"
end

-- The pictures that were asked for so far, by size and place.
local made = { [64] = {}, [128] = {} }
local function picture(size, place)
  local kept = made[size]
  if not kept[place] then
    kept[place] = ty.keep(ty.scope(function()
      local whole = decode(place)
      return size == 64 and halve(whole) or whole:clone()
    end))
  end
  return kept[place]
end

local function stacked(size, places)
  local list = {}
  for k, place in ipairs(places) do list[k] = picture(size, place) end
  return #list > 0 and ty.stack(list, 0) or ty.empty({ 0, 4, size, size }, { dtype = "u8" })
end

-- ---- splits ----

-- What a picture shows whoever does it: a man, a woman and a person who climb are one object, so that none of them is
-- held out while another is trained on.
local function object_of(code)
  return (" " .. code .. " "):gsub(" FE0F%f[ ]", ""):gsub(" 200D 264[02]%f[ ]", "")
    :gsub(" 1F46[89]%f[ ]", " 1F9D1"):match "^ (.-) ?$"
end

-- Of each subgroup a tenth of its objects is held out and another tenth for validation: which, the code points say.
local splits
local function read_splits()
  if splits then return splits end
  local subgroups, order = {}, {}
  for i, code in ipairs(read_index().codes) do
    local name = index.subgroups[i]
    if not subgroups[name] then
      subgroups[name] = { objects = {}, members = {} }
      order[#order + 1] = name
    end
    local object, group = object_of(code), subgroups[name]
    if not group.members[object] then
      group.members[object] = {}
      table.insert(group.objects, object)
    end
    table.insert(group.members[object], i - 1)
  end
  splits = { training = {}, validation = {}, held_out = {}, all = {} }
  for _, name in ipairs(order) do
    local group = subgroups[name]
    local rank = {}
    for _, object in ipairs(group.objects) do rank[object] = random.new(0, object, 0):bits() >> 1 end
    table.sort(group.objects, function(a, b) return rank[a] < rank[b] end)
    local tenth = (#group.objects + 5) // 10
    for k, object in ipairs(group.objects) do
      local part = k <= tenth and "held_out" or k <= 2 * tenth and "validation" or "training"
      table.move(group.members[object], 1, #group.members[object], #splits[part] + 1, splits[part])
    end
  end
  for i = 0, #index.codes - 1 do splits.all[i + 1] = i end
  for _, part in pairs(splits) do table.sort(part) end
  return splits
end

--- Names of all subgroups ("animal-mammal") in the order of Unicode's list.
---@return string[]
function M.subgroups()
  local names, known = {}, {}
  for _, name in ipairs(read_index().subgroups) do
    if not known[name] then names[#names + 1] = name end
    known[name] = true
  end
  return names
end

-- ---- the set ----

local Emoji = ty.data.class "Emoji"

-- The position in `all` of position i of this set.
local function place_of(self, who, what, i)
  local place = math.type(i) == "integer" and self.places[i + 1]
  return place or arguments.fail("%s: %s: expected 0 to %d, got %s", who, what, #self - 1, arguments.describe(i))
end

-- The same of a list or a tensor of positions, as a list.
local function places_of(self, who, positions)
  arguments.expect(who, "positions", positions, "a list or a tensor")
  if ty.is_tensor(positions) then
    if positions.ndim ~= 1 or positions.dtype ~= "i64" then
      arguments.fail("%s: positions: expected i64 of one dimension, got %s [%s]", who, positions.dtype,
        table.concat(positions.shape, ", "))
    end
    positions = positions:tolist()
  end
  local places = {}
  for k, i in ipairs(positions) do places[k] = place_of(self, who, "positions", i) end
  return places
end

local function describe(self, place)
  local item = { name = read_words "en".names[place + 1], keywords = read_words "en".keywords[place + 1], names = {},
    code = index.codes[place + 1], group = index.groups[place + 1], subgroup = index.subgroups[place + 1] }
  for _, language in ipairs(self.languages) do
    item.names[language] = read_words(language).names[place + 1]
    if language ~= "en" then
      item.translations = item.translations or {}
      item.translations[language] = read_words(language).keywords[place + 1]
    end
  end
  return item
end

--- The pictures at some positions.
---@param positions integer[]|Tensor
---@return Tensor u8 [n, 4, size, size], RGB and alpha (colours not multiplied by it)
function Emoji:pictures(positions)
  return stacked(self.side, places_of(self, "Emoji:pictures", positions))
end

--- { image = u8 [4, size, size], name, keywords (list of English words), names = { de = ... }, translations = { de =
-- list of keywords }, group, subgroup, code = "1F34E" }
---@param i integer
function Emoji:get(i)
  local place = place_of(self, "Emoji:get", "i", i)
  local item = describe(self, place)
  item.image = picture(self.side, place):clone()
  return item
end

--- Like get for many: image is u8 [n, 4, size, size], the other fields are lists.
---@param positions integer[]|Tensor
function Emoji:batch(positions)
  local places = places_of(self, "Emoji:batch", positions)
  local batch = { image = stacked(self.side, places) }
  for k, place in ipairs(places) do
    for field, value in pairs(describe(self, place)) do
      batch[field] = batch[field] or {}
      batch[field][k] = value
    end
  end
  return batch
end

--- The position of the picture with an English name, or nil where this split has none.
---@param name string "red apple"
---@return integer?
function Emoji:find(name)
  arguments.expect("Emoji:find", "name", name, "a string")
  if not self.by_name then
    self.by_name = {}
    for i, place in ipairs(self.places) do self.by_name[read_words "en".names[place + 1]] = i - 1 end
  end
  return self.by_name[name]
end

function Emoji:describe() return ("of %d x %d (%s)"):format(self.side, self.side, self.split) end

--- The position of the picture with an English name in the split "all", or nil.
---@param name string "red apple"
---@return integer?
function M.find(name)
  arguments.expect("datasets.emoji.find", "name", name, "a string")
  for i, known in ipairs(read_words "en".names) do
    if known == name then return i - 1 end
  end
  return nil
end

--- datasets.load("emoji", options). options: split ("training"; "validation", "held_out", "all"), size (64; or 128),
-- languages (all six), groups (a list of groups or subgroups, "Food & Drink", "animal-mammal": only theirs).
---@param options? {split: string, size: integer, languages: string[], groups: string[]}
function M.load(options)
  local o = arguments.read("datasets.emoji", options, { split = "training", size = 64, languages = languages,
    groups = arguments.none }, { split = '"training" or "validation" or "held_out" or "all"', size = "64 or 128",
    languages = "a list of strings", groups = "a list of strings" })
  for _, language in ipairs(o.languages) do
    local known = false
    for _, name in ipairs(languages) do known = known or name == language end
    if not known then
      arguments.fail("datasets.emoji: languages: expected some of %s, got \"%s\"", table.concat(languages, ", "),
        language)
    end
  end
  local places = read_splits()[o.split]
  if o.groups then
    local wanted, some = {}, {}
    for _, name in ipairs(o.groups) do wanted[name] = true end
    for _, place in ipairs(places) do
      if wanted[index.groups[place + 1]] or wanted[index.subgroups[place + 1]] then some[#some + 1] = place end
    end
    places = some
  end
  if #places == 0 then
    arguments.fail("datasets.emoji: the split \"%s\" has no pictures of groups %s", o.split,
      table.concat(o.groups, ", "))
  end
  return setmetatable({ places = places, size = #places, side = o.size, split = o.split, languages = o.languages },
    Emoji)
end

return M
