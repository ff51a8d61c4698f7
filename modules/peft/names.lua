--- The names that tensors have in adapter files, of PEFT, diffusers and kohya's scripts, and the modules they mean.
local ty = require "tycho"
local layers = require "tycho.peft.layers"
local ways = require "tycho.peft.ways"

local M = {}

-- How a name ends, and what the tensor is. What stands before is the module.
local endings = {
  { "%.lora_A%.weight$", "a" }, { "%.lora_B%.weight$", "b" }, { "%.lora_embedding_A$", "a" },
  { "%.lora_embedding_B$", "b" }, { "%.lora_magnitude_vector$", "magnitude" },
  { "%.lora_magnitude_vector%.weight$", "magnitude" },
  { "%.lora_down%.weight$", "a" }, { "%.lora_up%.weight$", "b" }, { "%.alpha$", "alpha" },
  { "%.dora_scale$", "magnitude" },
  { "%.lora%.down%.weight$", "a" }, { "%.lora%.up%.weight$", "b" },
  { "%.lora_linear_layer%.down%.weight$", "a" }, { "%.lora_linear_layer%.up%.weight$", "b" },
}

for _, field in ipairs(ways.fields) do endings[#endings + 1] = { "%." .. field .. "$", field } end

-- What may stand before the name of a module in diffusers' and kohya's files.
local outer = { "unet.", "transformer.", "text_encoder.", "diffusion_model.", "model.diffusion_model." }
local joined = { "lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_" }

local function after(text, prefix)
  return text:sub(1, #prefix) == prefix and text:sub(#prefix + 1) or nil
end

--- A function that finds what a name means in a model: the name as the model has it, or nil, and why not. has(name)
-- says whether the model has it.
function M.resolver(model, module_names)
  local by_joined = {}
  for _, name in ipairs(module_names) do
    local flat = name:gsub("%.", "_")
    by_joined[flat] = by_joined[flat] and "several" or name
  end
  return function(path, has)
    path = after(path, "base_model.model.") or path
    if has(path) then return path end
    local prefixes = { model.published_prefix }
    for _, list in ipairs { model.prefixes or {}, outer } do table.move(list, 1, #list, #prefixes + 1, prefixes) end
    for _, prefix in ipairs(prefixes) do
      local rest = after(path, prefix)
      if rest and has(rest) then return rest end
    end
    for _, prefix in ipairs(model.missing_prefixes or {}) do
      if has(prefix .. path) then return prefix .. path end
    end
    for _, prefix in ipairs(joined) do
      local name = by_joined[after(path, prefix) or false]
      if name == "several" then return nil, "stands for several modules" end
      if name and has(name) then return name end
    end
    return nil
  end
end

--- What a name says: the name of the module and "a", "b", "magnitude", "alpha" or the name of a parameter of another
-- way; or the name of a whole parameter.
function M.split(key)
  for _, ending in ipairs(endings) do
    local at = key:find(ending[1])
    if at then return key:sub(1, at - 1), ending[2] end
  end
  return (key:gsub("%.base_layer%.", "."):gsub("%.modules_to_save%.", "."):gsub("%.original_module%.", "."))
end

--- The adapter's tensors by the names of PEFT's files. prefix: of the model's names in transformers.
---@return table<string, Tensor>
function M.state(record, prefix)
  local state, adapted = {}, {}
  local start = "base_model.model." .. prefix
  for _, layer in ipairs(record.layers) do
    adapted[layer.module] = true
    for _, pair in ipairs(layers.published(layer.module)) do
      state[start .. layer.name .. "." .. pair[1]] = pair[2]:detach()
    end
  end
  for _, saved in ipairs(record.saved) do
    local name = saved.name
    -- PEFT's layers keep the layer that they wrap under this name.
    if adapted[saved.owner] then name = name:gsub("([^.]+)$", "base_layer.%1") end
    state[start .. name] = rawget(saved.owner, saved.key):detach()
  end
  return state
end

--- A tensor's shape in words.
function M.shape_text(t) return "[" .. table.concat(t.shape, ", ") .. "]" end

--- The tensor as [rows, columns]; those of 1x1 convolutions have two dimensions more.
function M.flat(t)
  local shape = t.shape
  while #shape > 2 and shape[#shape] == 1 do shape[#shape] = nil end
  return #shape < #t.shape and ty.reshape(t, shape) or t
end

return M
