--- Configurations: the keys of a published config.json, checked. A family lists its fields once; a table that somebody
-- writes in a script and the file of a checkpoint are read by the same rules.
local ty = require "tycho"

local M = {}

local function is_integer(value) return type(value) == "number" and math.tointeger(value) ~= nil end

-- Whether a value is a list, short enough for a model, of elements that all pass the test.
local function is_list(value, test)
  if type(value) ~= "table" or #value == 0 or #value > 1000 then return false end
  local count = 0
  for _ in pairs(value) do count = count + 1 end
  for _, element in ipairs(value) do
    if not test(element) then return false end
  end
  return count == #value
end

-- What a kind of field accepts, and its name in errors.
local kinds
kinds = {
  count = { "a positive integer", function(v) return is_integer(v) and v >= 1 and v < 2 ^ 31 end },
  -- Modules are made one by one: a file must not ask for a million.
  few = { "a positive integer up to 10000", function(v) return is_integer(v) and v >= 1 and v <= 10000 end },
  integer = { "an integer", is_integer },
  number = { "a number", function(v) return type(v) == "number" and v == v and math.abs(v) < math.huge end },
  epsilon = { "a number >= 0", function(v) return type(v) == "number" and v >= 0 and v < math.huge end },
  share = { "a number in [0, 1]", function(v) return type(v) == "number" and v >= 0 and v <= 1 end },
  flag = { "true or false", function(v) return type(v) == "boolean" end },
  text = { "text", function(v) return type(v) == "string" end },
  table = { "an object", function(v) return type(v) == "table" end },
  counts = { "a list of positive integers", function(v) return is_list(v, kinds.count[2]) end },
  numbers = { "a list of numbers", function(v) return is_list(v, kinds.number[2]) end },
  texts = { "a list of texts", function(v) return is_list(v, kinds.text[2]) end },
  layers = { "an integer or a list of integers", function(v) return is_integer(v) or is_list(v, is_integer) end },
  size = { "a positive integer or two of them", function(v)
    return kinds.count[2](v) or is_list(v, kinds.count[2]) and #v == 2
  end },
  rank = { "a positive integer or auto", function(v) return v == "auto" or kinds.count[2](v) end },
  range = { "two numbers, the first not above the second", function(v)
    return type(v) == "table" and #v == 2 and type(v[1]) == "number" and type(v[2]) == "number" and v[1] <= v[2]
  end },
  few_each = { "a positive integer up to 10000 or a list of them", function(v)
    return kinds.few[2](v) or is_list(v, kinds.few[2])
  end },
  count_each = { "a positive integer or a list of them", function(v)
    return kinds.count[2](v) or is_list(v, kinds.count[2])
  end },
  flag_each = { "true or false or a list of them", function(v)
    return kinds.flag[2](v) or is_list(v, kinds.flag[2])
  end },
  depths = { "an integer in [0, 1000], a list of them or a list of such lists", function(v)
    local function depth(d) return is_integer(d) and d >= 0 and d <= 1000 end
    return depth(v) or is_list(v, function(each) return depth(each) or is_list(each, depth) end)
  end },
  places = { "a list of integers >= 0", function(v)
    return type(v) == "table" and next(v) == nil or is_list(v, function(p) return is_integer(p) and p >= 0 end)
  end },
}

-- Keys that every published file may have and that do not change what is computed.
local general = {}
for name in ([[model_type architectures transformers_version torch_dtype dtype _name_or_path use_cache return_dict
  output_attentions output_hidden_states initializer_range initializer_factor pad_token_id bos_token_id eos_token_id
  sep_token_id cls_token_id decoder_start_token_id is_decoder is_encoder_decoder add_cross_attention
  tie_encoder_decoder chunk_size_feed_forward id2label label2id num_labels problem_type pretraining_tp
  gradient_checkpointing task_specific_params attn_implementation n_ctx n_positions summary_type summary_use_proj
  summary_activation summary_proj_to_labels summary_first_dropout output_past cross_attention_hidden_size torchscript
  out_features out_indices stage_names pruned_heads tokenizer_class prefix auto_map _class_name _diffusers_version]])
  :gmatch "%S+" do general[name] = true end

--- The fields of a configuration from `given`. fields: name -> { kind, default }; without a default the field must be
-- there; a default of M.none leaves it nil. A null of the file is as if the name were not there, unless the field has a
-- `null` that stands for it. Unknown names are an error in a table from a script; a published file (which names its
-- model_type or _class_name) may say more than is needed, and what is not known comes as config.unknown.
---@param who string            the family, for errors
---@param given table
---@param fields table<string, table>
---@return table config
function M.read(who, given, fields)
  if type(given) ~= "table" then
    error(("%s: expected a table with the config, got %s"):format(who, type(given)), 0)
  end
  local config, missing, unknown = { model_type = given.model_type, unknown = {} }, {}, {}
  for name, field in pairs(fields) do
    local value, kind = given[name], kinds[field[1]]
    if value == ty.io.null then value = nil end
    if value == nil and given[name] ~= nil and field.null ~= nil then
      config[name] = field.null
    elseif value == nil then
      if field[2] == nil then missing[#missing + 1] = name end
      if field[2] ~= M.none then config[name] = field[2] end
    elseif not kind[2](value) then
      error(("%s: config key '%s' must be %s, got %s"):format(who, name, kind[1],
        type(value) == "table" and "a table" or tostring(value)), 0)
    else
      config[name] = (field[1] == "count" or field[1] == "few") and math.tointeger(value) or value
    end
  end
  for name in pairs(given) do
    if fields[name] == nil then
      if general[name] then config[name] = given[name] else unknown[#unknown + 1] = tostring(name) end
    end
  end
  table.sort(missing)
  table.sort(unknown)
  if #missing > 0 then
    error(("%s: the config has no %s%s"):format(who, table.concat(missing, ", "),
      #unknown > 0 and "; it has the unknown " .. table.concat(unknown, ", ") or ""), 0)
  end
  if #unknown > 0 and given.model_type == nil and given._class_name == nil then
    local names = {}
    for name in pairs(fields) do names[#names + 1] = name end
    table.sort(names)
    error(("%s: no config key '%s'; there are: %s"):format(who, unknown[1], table.concat(names, ", ")), 0)
  end
  if given.quantization_config and given.quantization_config ~= ty.io.null then
    error(("%s: the weights are quantized by %s, which is not read"):format(who,
      tostring(type(given.quantization_config) == "table" and given.quantization_config.quant_method or "?")), 0)
  end
  config.unknown, config.given = unknown, given
  return config
end

M.none = {}

--- Adds the unknown keys of a config's parts to its own, with the name of the part before them.
---@param config table
---@param parts table<string, table>  name -> the config of that part, as read() gives it
function M.with_parts(config, parts)
  for name, part in pairs(parts) do
    for _, key in ipairs(part.unknown) do table.insert(config.unknown, name .. "." .. key) end
  end
  table.sort(config.unknown)
end

--- An error that names the key unless its value is the only one that is computed here, or one of those that are.
---@param who string
---@param config table
---@param only table<string, any>  key -> the value, or a list of values (false: that, or null)
function M.only(who, config, only)
  for key, values in pairs(only) do
    local value, list, ok = config[key], type(values) == "table" and values or { values }, false
    for _, allowed in ipairs(list) do ok = ok or value == allowed or value == nil and allowed == false end
    if not ok then
      local texts = {}
      for i, allowed in ipairs(list) do texts[i] = tostring(allowed) end
      error(("%s: config key '%s': expected %s, got %s, which is not supported"):format(who, key,
        table.concat(texts, " or "), type(value) == "table" and "a table" or tostring(value)), 0)
    end
  end
end

--- An error when `divisor` does not divide `number`, both named by config keys.
function M.divides(who, config, divisor, number)
  if config[number] % config[divisor] ~= 0 then
    error(("%s: %s %d must divide %s %d"):format(who, divisor, config[divisor], number, config[number]), 0)
  end
end

--- The kinds of the layers, "sliding_attention" or "full_attention": by the config's layer_types, else those for which
-- full(i) is true see all, counted from 1.
---@return string[]
function M.layer_types(who, config, full)
  local types, count = config.layer_types, config.num_hidden_layers
  if not types then
    types = {}
    for i = 1, count do types[i] = full(i) and "full_attention" or "sliding_attention" end
  end
  if #types ~= count then
    error(("%s: config key 'layer_types': expected one for each of the %d layers, got %d"):format(who, count,
      #types), 0)
  end
  for _, kind in ipairs(types) do
    if kind ~= "full_attention" and kind ~= "sliding_attention" then
      error(("%s: config key 'layer_types': expected full_attention or sliding_attention, got %s"):format(who, kind), 0)
    end
  end
  return types
end

--- The config with tie_word_embeddings = false where a file has a head that is not its embedding, whatever the config
-- says: as transformers does. heads, embeddings: the names that they may have.
---@param given table
---@param state? table<string, Tensor>
function M.untied(given, state, heads, embeddings)
  local function named(names)
    for _, name in ipairs(names) do
      if state[name] then return state[name] end
    end
  end
  local head, embedding = state and named(heads), state and named(embeddings)
  if given.tie_word_embeddings == false or not head or not embedding or not head:is_floating_point() then
    return given
  end
  local same = table.concat(head.shape, " ") == table.concat(embedding.shape, " ") and head.dtype == embedding.dtype
    and head:eq(embedding):all():item()
  if same then return given end
  local config = {}
  for key, value in pairs(given) do config[key] = value end
  config.tie_word_embeddings = false
  return config
end

--- How many labels a classifier's config has: transformers writes them as id2label, and 2 by leaving them out.
function M.labels(config)
  local count = 0
  for _ in pairs(type(config.id2label) == "table" and config.id2label or {}) do count = count + 1 end
  if count > 0 then return count end
  local given = config.num_labels
  if given == nil or given == ty.io.null then return 2 end
  if not kinds.few[2](given) then
    error(("config key 'num_labels' must be %s, got %s"):format(kinds.few[1], tostring(given)), 0)
  end
  return math.tointeger(given)
end

-- Activations by their names in config.json, as ty.glu and ty.linear call them.
local activations = { silu = "silu", swish = "silu", relu = "relu", gelu = "gelu", gelu_new = "gelu_tanh",
  gelu_pytorch_tanh = "gelu_tanh", gelu_fast = "gelu_tanh" }

--- The name of an activation for ty.glu and ty.linear. key: of the config, for errors. more: a table with further names
-- that the caller has.
function M.activation(who, name, key, more)
  if activations[name] then return activations[name] end
  local names = {}
  for known in pairs(activations) do names[#names + 1] = known end
  for known in pairs(more or {}) do names[#names + 1] = known end
  table.sort(names)
  error(("%s: config key '%s': unknown activation '%s'; there are %s"):format(who, key, tostring(name),
    table.concat(names, ", ")), 0)
end

return M
