--- What a model that sees costs, from shapes: floating-point operations of reading a prompt and of a further token, and
-- bytes of keys and values, layer by layer. Products and attention count, 2 for a multiplication and an addition, and
-- attention as if all pairs were computed, as papers on fewer visual tokens count.
local arguments = require "tycho.arguments"

-- Weights that each token of a decoder's layer is multiplied by.
local function weights(c)
  local heads, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
  return c.hidden_size * (2 * heads + 2 * kv + 3 * c.intermediate_size)
end

-- The tower and the projector, of one picture; of towers that are no transformers only how many features they give.
local function seeing(model)
  local c, text = model.vision_tower.config, model.language_model.config
  if not c.intermediate_size then return nil, (c.image_size // c.patch_size) ^ 2 // 1 | 0 end
  local side, patch, w = c.image_size, c.patch_size, c.hidden_size
  local patches = (side // patch) ^ 2
  local tokens, chosen = patches + 1, model.config.vision_feature_layer
  local layers = chosen < 0 and c.num_hidden_layers + 1 + chosen or chosen
  local inner = c.intermediate_size
  local flops = 2 * patches * patch * patch * (c.num_channels or 3) * w
    + layers * (2 * tokens * (4 * w * w + 2 * w * inner) + 4 * tokens * tokens * w)
  local features = model.config.vision_feature_select_strategy == "full" and tokens or patches
  return flops + 2 * features * (w * text.hidden_size + text.hidden_size ^ 2), math.tointeger(features)
end

--- options: text (16: tokens of the prompt beside the picture), pictures (1), features (of a picture; as many as the
-- tower has patches), shares (of a picture's tokens that each layer keeps: tycho.vlm.mixture_of_depths), bytes (4: of a
-- number in the cache). Returns a table with
--   layers   of each layer: tokens that it works on, flops of the prompt, kv (bytes)
--   prefill  flops of the decoder's layers and of the head for the last token
--   decode   flops of one token more
--   kv       bytes of keys and values after the prompt
--   seeing   flops of the tower and the projector (nil where the tower is no transformer)
---@param model Llava
---@param options? table
---@return table
return function(model, options)
  local who = "vlm.cost"
  arguments.expect(who, "model", model, "a module")
  if not model.language_model or not model.vision_tower then
    arguments.fail("%s: model: expected a model that sees, got %s", who, arguments.describe(model))
  end
  local o = arguments.read(who, options, { text = 16, pictures = 1, features = arguments.none,
    shares = arguments.none, bytes = 4 }, { text = "an integer >= 0", pictures = "an integer >= 0",
    features = "an integer >= 0", shares = "a list of numbers", bytes = "a number > 0" })
  local c = model.language_model.config
  local one, features = seeing(model)
  features = o.features or features
  local per_token, heads = weights(c), c.num_attention_heads * c.head_dim
  local result = { layers = {}, prefill = 2 * c.hidden_size * c.vocab_size, decode = 2 * c.hidden_size * c.vocab_size,
    kv = 0, seeing = one and one * o.pictures }
  for i = 1, c.num_hidden_layers do
    local share = o.shares and o.shares[i] or 1
    local tokens = o.text + math.floor(share * features * o.pictures + 1e-9)
    local flops = 2 * tokens * per_token + 4 * heads * tokens * tokens
    if share < 1 then flops = flops + 2 * (o.text + features * o.pictures) * c.hidden_size end -- its router
    local kv = 2 * tokens * c.num_key_value_heads * c.head_dim * o.bytes
    result.layers[i] = { tokens = tokens, flops = flops, kv = kv }
    result.prefill, result.kv = result.prefill + flops, result.kv + kv
    result.decode = result.decode + 2 * per_token + 4 * heads * (tokens + 1)
  end
  return result
end
