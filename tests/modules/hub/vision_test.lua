-- Networks of pictures and words in transformers' folders: what is saved is what was loaded, names and configs of other
-- versions, what does not fit.
local here = (arg and arg[0]:match ".*/" or "tests/modules/hub/") .. "../../lua/"
local check = dofile(here .. "check.lua")
local scratch = dofile(here .. "scratch.lua")
local ty = require "tycho"
local hub = require "tycho.hub"

local root = check.root .. "tests/fixtures/vision/"

local function same(a, b, what)
  local left, right = a:state_dict(), b:state_dict()
  local names = 0
  for key, t in pairs(left) do
    names = names + 1
    check.ok(right[key] and right[key].dtype == t.dtype and right[key]:eq(t):all():item(), what .. " " .. key)
  end
  for _ in pairs(right) do names = names - 1 end
  check.equal(names, 0, what)
end

-- A folder with a fixture's config, changed, and its tensors by the names that rename(name) gives them.
local count = 0
local function folder(name, change, rename)
  count = count + 1
  local path = scratch.file("vision" .. count)
  ty.io.mkdir(path)
  local config = ty.io.load_json(root .. name .. "/config.json")
  change(config)
  ty.io.save_json(path .. "/config.json", config)
  local state = {}
  for key, t in pairs(ty.io.load(root .. name .. "/model.safetensors")) do state[rename and rename(key) or key] = t end
  ty.io.save_safetensors(path .. "/model.safetensors", state)
  return path
end

local function nothing() end

local names = {}
for _, name in ipairs(ty.io.listdir(root)) do
  if ty.io.stat(root .. name).kind == "directory" then names[#names + 1] = name end
end

for _, name in ipairs(names) do
  check.test(name .. ": what is saved is what was loaded, the config too", function()
    local model = hub.load(root .. name)
    check.equal({ model.training, model.config.unknown }, { false, {} })
    check.equal(model:parameters()[1].dtype, "bf16")
    local path = scratch.file(name)
    model:save(path)
    same(model, hub.load(path), name)
    local given, written = ty.io.load_json(root .. name .. "/config.json"), ty.io.load_json(path .. "/config.json")
    given.dtype, given.torch_dtype = nil, "bfloat16"
    local function compare(from, to, where)
      for key, value in pairs(from) do
        if type(value) == "table" and type(to[key]) == "table" then
          compare(value, to[key], where .. key .. ".")
        else
          check.equal(to[key], value, name .. " " .. where .. key)
        end
      end
    end
    compare(given, written, "")
    -- Made from the config alone.
    local fresh = hub.load(root .. name, { weights = false })
    check.equal(fresh:count_parameters(), model:count_parameters())
    check.equal(fresh:parameters()[1].dtype, "f32")
  end)
end

check.test("names that other versions wrote", function()
  local text = hub.load(root .. "clip_text_bare")
  same(text, hub.load(folder("clip_text_bare", nothing, function(key) return "text_model." .. key end)), "text")
  local vision = hub.load(root .. "clip_vision_bare")
  same(vision, hub.load(folder("clip_vision_bare", nothing, function(key) return "vision_model." .. key end)), "vision")
  local vit = hub.load(root .. "vit")
  same(vit, hub.load(folder("vit", nothing, function(key) return "vit." .. key end)), "vit")
  -- Without architectures the encoder alone; without model_type what the architecture begins with.
  local bare = hub.load(folder("vit", function(config) config.architectures = nil end))
  same(vit, bare, "without architectures")
  same(hub.load(root .. "clip"), hub.load(folder("clip", function(config) config.model_type = nil end)), "CLIPModel")
end)

check.test("configs of old: position_ids in the file, parts under two names, keys of generation", function()
  local whole = hub.load(root .. "clip")
  local path = folder("clip", function(config)
    config.text_config_dict = { eos_token_id = 2, hidden_size = 16 }
    config.text_config.hidden_size = 99 -- text_config_dict counts
    config.vision_config_dict = ty.io.null
    config.text_config.num_beams, config.text_config.dropout = 1, 0.0
  end)
  local state = ty.io.load(path .. "/model.safetensors")
  state["text_model.embeddings.position_ids"] = ty.arange(12):unsqueeze(0)
  state["vision_model.embeddings.position_ids"] = ty.arange(5):unsqueeze(0)
  ty.io.save_safetensors(path .. "/model.safetensors", state)
  local model = hub.load(path)
  same(whole, model, "old")
  check.equal(model.config.unknown, { "text_config.num_beams" })
  local again = scratch.file "again"
  model:save(again)
  local config = ty.io.load_json(again .. "/config.json")
  check.equal({ config.text_config.hidden_size, config.text_config.num_beams, config.text_config_dict }, { 16, 1 })
end)

check.test("what does not fit is one clear error", function()
  local function fails(name, change, text)
    check.fails(function() hub.load(folder(name, change)) end, text)
  end
  fails("vit", function(config) config.num_hidden_layers = 4 end,
    "missing (16):\n    encoder.layer.N.attention.attention.key (2): encoder.layer.3")
  fails("vit", function(config) config.image_size = 20 end,
    "embeddings.position_embeddings: the model has [1, 26, 24], the file [1, 17, 24]")
  fails("vit", function(config) config.patch_size = { 4, 0 } end,
    "config.json: ViT: config key 'patch_size' must be a positive integer or two of them, got a table")
  fails("clip", function(config) config.text_config.hidden_act = "swoosh" end,
    "CLIP: config key 'hidden_act': unknown activation 'swoosh'; there are gelu,")
  fails("clip", function(config) config.vision_config = { 1 } end, "the weights do not fit the model")
  fails("clip", function(config) config.vision_config.num_hidden_layers = 1 << 30 end,
    "CLIPModel: vision_config: config key 'num_hidden_layers' must be a positive integer up to 10000, got 1073741824")
  fails("clip_text", function(config) config.vocab_size = ty.io.null end, "the file [40, 16]")
  fails("clip_text", function(config) config.model_type = "clip_text" end,
    "model_type 'clip_text' is not known; there are action_model, bert, camembert, clip,")
end)

check.finish()
