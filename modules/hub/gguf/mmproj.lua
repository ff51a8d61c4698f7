--- Pictures beside a language model in a GGUF file: the file that llama.cpp calls mmproj, with CLIP's tower and the
-- projector of LLaVA 1.5 or of LLaVA-NeXT (1.6), which sees tiles, read and written.
--
--     local llava = hub.mmproj.load("mmproj.gguf", hub.load "model.gguf")
--     hub.mmproj.save(llava, "mmproj.gguf")
local ty = require "tycho"
local arguments = require "tycho.arguments"
local loader = require "tycho.hub.load"
local models = require "tycho.models"

local expect = arguments.expect
local M = {}

-- Names outside of layers, and inside; those of the tower begin with vision_model.
local outer = { ["v.class_embd"] = "embeddings.class_embedding",
  ["v.patch_embd.weight"] = "embeddings.patch_embedding.weight",
  ["v.position_embd.weight"] = "embeddings.position_embedding.weight", ["v.pre_ln"] = "pre_layrnorm",
  ["v.post_ln"] = "post_layernorm" }
local inner = { attn_q = "self_attn.q_proj", attn_k = "self_attn.k_proj", attn_v = "self_attn.v_proj",
  attn_out = "self_attn.out_proj", ln1 = "layer_norm1", ln2 = "layer_norm2", ffn_up = "mlp.fc1",
  ffn_down = "mlp.fc2" }
local projector = { ["mm.0"] = "linear_1", ["mm.2"] = "linear_2" }

local function key_of(map, value)
  for key, other in pairs(map) do
    if other == value then return key end
  end
end

-- The name of a tensor of the tower in a file, from that of CLIP's.
local function name_of(name)
  name = name:gsub("^vision_model%.", "")
  local whole = key_of(outer, name)
  if whole then return whole end
  local stem, kind = name:match "^(.*)%.(%a+)$"
  local layer, part = stem:match "^encoder%.layers%.(%d+)%.(.*)$"
  if layer then return ("v.blk.%s.%s.%s"):format(layer, assert(key_of(inner, part)), kind) end
  return assert(key_of(outer, stem)) .. "." .. kind
end

-- The other way; nil for what is none of the tower's.
local function own_name(name)
  if outer[name] then return "vision_model." .. outer[name] end
  local stem, kind = name:match "^(.*)%.(%a+)$"
  if not stem then return nil end
  local layer, part = stem:match "^v%.blk%.(%d+)%.([%w_]+)$"
  if layer and inner[part] then return ("vision_model.encoder.layers.%s.%s.%s"):format(layer, inner[part], kind) end
  return outer[stem] and ("vision_model.%s.%s"):format(outer[stem], kind) or nil
end

-- ---- writing ----

--- Writes the tower and the projector of a Llava or a LlavaNext, whose tower is CLIP's. options: dtype (f16; of
-- matrices), image_mean and image_std (those of CLIP), which llama.cpp wants to know. The language model goes into a
-- file of its own: hub.save_gguf(llava.language_model, path).
---@param model Llava
---@param path string
---@param options? { dtype?: string, image_mean?: number[], image_std?: number[] }
function M.save(model, path, options)
  local who = "hub.mmproj.save"
  expect(who, "model", model, "a module")
  expect(who, "path", path, "a string")
  local o = arguments.read(who, options, { dtype = "f16", image_mean = { 0.48145466, 0.4578275, 0.40821073 },
    image_std = { 0.26862954, 0.26130258, 0.27577711 } }, { dtype = '"f32" or "f16"',
    image_mean = "a list of numbers", image_std = "a list of numbers" })
  local tower = model.vision_tower
  if model.family ~= "Llava" and model.family ~= "LlavaNext" or getmetatable(tower).__name ~= "CLIPVisionModel" then
    arguments.fail("%s: model: expected a Llava or a LlavaNext with CLIP's tower, got a %s", who,
      getmetatable(model).__name)
  end
  local c, vision = model.config, tower.config
  if c.vision_feature_select_strategy ~= "default" or c.projector_hidden_act ~= "gelu"
    or not c.multimodal_projector_bias or type(vision.image_size) == "table" or type(vision.patch_size) == "table"
    or vision.hidden_act ~= "gelu" and vision.hidden_act ~= "quick_gelu" then
    arguments.fail("%s: model: expected square pictures, features without the class, gelu and biases in the projector, "
      .. "gelu or quick_gelu in the tower; files of this kind have no others", who)
  end
  local count, layers = vision.num_hidden_layers, {}
  local chosen = c.vision_feature_layer
  for i, layer in ipairs(type(chosen) == "table" and chosen or { chosen }) do
    layers[i] = layer < 0 and count + 1 + layer or layer
  end
  local metadata = { ["general.architecture"] = "clip", ["general.type"] = "mmproj", ["clip.projector_type"] = "mlp",
    ["clip.has_vision_encoder"] = true, ["clip.has_llava_projector"] = true,
    ["clip.use_gelu"] = vision.hidden_act == "gelu", ["general.file_type"] = o.dtype == "f16" and 1 or 0 }
  local types = { ["general.file_type"] = "u32" }
  for key, value in pairs { image_size = vision.image_size, patch_size = vision.patch_size, block_count = count,
    embedding_length = vision.hidden_size, feed_forward_length = vision.intermediate_size,
    projection_dim = model.language_model.config.hidden_size, ["attention.head_count"] = vision.num_attention_heads } do
    metadata["clip.vision." .. key], types["clip.vision." .. key] = value, "u32"
  end
  metadata["clip.vision.attention.layer_norm_epsilon"] = vision.layer_norm_eps
  metadata["clip.vision.feature_layer"] = layers
  metadata["clip.vision.image_mean"], metadata["clip.vision.image_std"] = o.image_mean, o.image_std
  types["clip.vision.attention.layer_norm_epsilon"] = "f32"
  types["clip.vision.image_mean"], types["clip.vision.image_std"] = "f32[]", "f32[]"
  local tensors = {}
  if model.image_newline then
    local flat = {} -- widths before heights
    for _, size in ipairs(c.image_grid_pinpoints) do
      flat[#flat + 1] = math.tointeger(size[2])
      flat[#flat + 1] = math.tointeger(size[1])
    end
    metadata["clip.vision.image_grid_pinpoints"] = flat
    metadata["clip.vision.mm_patch_merge_type"] = "spatial_unpad"
    metadata["clip.vision.image_crop_resolution"] = vision.image_size
    types["clip.vision.image_crop_resolution"] = "u32"
    tensors["model.image_newline"] = model.image_newline:detach():to { device = "cpu", dtype = "f32" }:contiguous()
  end
  local function put(name, t)
    local small = t.ndim < 2 or name == "v.position_embd.weight"
    tensors[name] = t:detach():to { device = "cpu" }:to(small and "f32" or o.dtype):contiguous()
  end
  for name, t in pairs(tower:state_dict()) do
    -- Features are taken before the last norm, and llama.cpp would use one that it finds.
    if not name:find "post_layernorm" then put(name_of(name), t) end
  end
  for name, t in pairs(model.multi_modal_projector:state_dict()) do
    local stem, kind = name:match "^(.*)%.(%a+)$"
    put(key_of(projector, stem) .. "." .. kind, t)
  end
  ty.io.save_gguf(path, tensors, metadata, { types = types })
end

-- ---- reading ----

local function fail(path, text, ...) arguments.fail("hub.mmproj.load: %s: " .. text, path, ...) end

local function integer(path, metadata, key)
  local value = metadata["clip.vision." .. key]
  if math.type(value) ~= "integer" or value < 1 or value > 1 << 20 then
    fail(path, "clip.vision.%s: expected a positive integer, got %s", key, arguments.describe(value))
  end
  return value
end

-- The keys of config.json of a tower, and of which layers the features are.
local function config_of(path, metadata, tensors)
  local count = integer(path, metadata, "block_count")
  local layers, list = metadata["clip.vision.feature_layer"], {}
  for i, layer in ipairs(type(layers) == "table" and layers or {}) do
    if math.type(layer) ~= "integer" or layer < 0 or layer > count then
      fail(path, "clip.vision.feature_layer: expected integers from 0 to %d, got %s", count, arguments.describe(layer))
    end
    list[i] = layer
  end
  -- Files that do not say have the features before the last layer.
  if #list == 0 then list[1] = count - 1 end
  local hidden = integer(path, metadata, "embedding_length")
  local position = tensors["v.position_embd.weight"]
  if not position or not tensors["v.class_embd"] then fail(path, "expected the tower of CLIP, got another") end
  local eps = metadata["clip.vision.attention.layer_norm_epsilon"]
  return { model_type = "clip_vision_model", image_size = integer(path, metadata, "image_size"),
    patch_size = integer(path, metadata, "patch_size"), hidden_size = hidden, num_hidden_layers = count,
    intermediate_size = integer(path, metadata, "feed_forward_length"), layer_norm_eps = eps,
    num_attention_heads = integer(path, metadata, "attention.head_count"),
    hidden_act = metadata["clip.use_gelu"] == true and "gelu" or "quick_gelu" }, #list == 1 and list[1] or list
end

-- Old files have the two matrices of a layer's feed-forward network by each other's names.
local function turned(tensors, vision)
  local up = tensors["v.blk.0.ffn_up.weight"]
  return up and up.shape[1] == vision.hidden_size and vision.hidden_size ~= vision.intermediate_size
end

-- The sizes { height, width } that pictures are fitted into, of files with tiles.
local function pinpoints_of(path, metadata)
  local flat, list = metadata["clip.vision.image_grid_pinpoints"], {}
  if type(flat) ~= "table" or #flat == 0 or #flat % 2 ~= 0 then
    fail(path, "clip.vision.image_grid_pinpoints: expected pairs of integers, got %s", arguments.describe(flat))
  end
  for i = 1, #flat, 2 do list[#list + 1] = { flat[i + 1], flat[i] } end
  return list
end

--- A Llava (or, of a file with tiles, a LlavaNext) of an mmproj file and the language model that it belongs to, which
-- stays as it is. options: dtype (f32: of the tower and the projector), image_token (the token that stands for a
-- feature; by default the first number behind the vocabulary). A file of another kind, or of another model, is one
-- error.
---@param path string
---@param language LanguageModel
---@param options? { dtype?: string, image_token?: integer }
---@return Llava model
---@return table metadata  of the file: clip.vision.image_mean and image_std among it
function M.load(path, language, options)
  local who = "hub.mmproj.load"
  expect(who, "path", path, "a string")
  expect(who, "language", language, "a module")
  local o = arguments.read(who, options, { dtype = "f32", image_token = arguments.none },
    { dtype = "a string", image_token = "an integer >= 0" })
  if not language.config or not language.embed or not language.config.hidden_size then
    arguments.fail("%s: language: expected a language model, got %s", who, arguments.describe(language))
  end
  local tensors, metadata = ty.io.load_gguf(path)
  if metadata["general.architecture"] ~= "clip" or metadata["clip.has_vision_encoder"] ~= true then
    fail(path, "expected an mmproj file with a network of pictures, got architecture %s",
      arguments.describe(metadata["general.architecture"]))
  elseif metadata["clip.projector_type"] ~= "mlp" and metadata["clip.projector_type"] ~= nil then
    fail(path, "clip.projector_type: expected mlp, got %s", arguments.describe(metadata["clip.projector_type"]))
  elseif tensors["v.post_ln.weight"] then
    fail(path, "expected a tower without a last norm, as LLaVA's")
  end
  local vision, layers = config_of(path, metadata, tensors)
  local first, last = tensors["mm.0.weight"], tensors["mm.2.weight"]
  if not first or not last or first.ndim ~= 2 or last.ndim ~= 2 then
    fail(path, "expected the projector mm.0 and mm.2, got none")
  elseif last.shape[1] ~= language.config.hidden_size then
    fail(path, "makes features of %d, the language model takes %d: it belongs to another model", last.shape[1],
      language.config.hidden_size)
  end
  local swap, state, rest = turned(tensors, vision), {}, {}
  for name, t in pairs(tensors) do
    if swap then
      name = name:gsub("ffn_up", "ffn_"):gsub("ffn_down", "ffn_up"):gsub("ffn_%.", "ffn_down.")
    end
    local stem, kind = name:match "^(.*)%.(%a+)$"
    local own = own_name(name)
    t = t:to(o.dtype)
    if own then state[own] = t elseif projector[stem] then rest[projector[stem] .. "." .. kind] = t end
  end
  for name, value in pairs { weight = 1, bias = 0 } do
    state["vision_model.post_layernorm." .. name] = ty.full({ vision.hidden_size }, value, { dtype = o.dtype })
  end
  local text, newline = language:published_config(), tensors["model.image_newline"]
  if (metadata["clip.vision.mm_patch_merge_type"] == "spatial_unpad") ~= (newline ~= nil) then
    fail(path, "expected model.image_newline with mm_patch_merge_type spatial_unpad, got one without the other")
  elseif newline and (newline.ndim ~= 1 or newline.shape[1] ~= language.config.hidden_size) then
    fail(path, "model.image_newline: expected [%d], got %s", language.config.hidden_size, arguments.describe(newline))
  end
  local ok, model = pcall(ty.nn.with_defaults, { init = false, device = "meta" },
    newline and models.LlavaNext or models.Llava, { model_type = newline and "llava_next" or "llava",
      text_config = text, vision_config = vision, vision_feature_layer = layers,
      image_token_index = o.image_token or language.config.vocab_size,
      tie_word_embeddings = language.config.tie_word_embeddings,
      image_grid_pinpoints = newline and pinpoints_of(path, metadata) or nil })
  if not ok then fail(path, "%s", model) end
  model.language_model = language
  local device = language:device()
  local fits, report = pcall(loader.assign, model.vision_tower, state, { device = device })
  if not fits then fail(path, "%s", report) end
  for name, p in model.multi_modal_projector:named_parameters() do
    local t, layer, kind = rest[name], name:match "^(.*)%.(%a+)$"
    if not t or table.concat(t.shape, " ") ~= table.concat(p.shape, " ") then
      fail(path, "projector: expected %s [%s], got %s", name, table.concat(p.shape, ", "), arguments.describe(t))
    end
    rawset(model.multi_modal_projector[layer], kind, ty.keep(t:to { device = device }:detach():requires_grad_()))
  end
  if newline then
    newline = newline:to(o.dtype):to { device = device }:detach():requires_grad_()
    rawset(model, "image_newline", ty.keep(newline))
  end
  return model:train(language.training), metadata
end

return M
