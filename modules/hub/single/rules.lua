--- The names that tensors have in the checkpoints of the authors of Stable Diffusion and Flux, as rules for those of
-- diffusers and transformers. A rule is { pattern, name, how }: `name` may have the pattern's captures (%1 ...) or be a
-- function of them; how: "split" cuts the first dimension into as many tensors as `name` is a list of (with `parts`:
-- into these shares), "swap" exchanges the halves of the first dimension (the authors shift before they scale),
-- "matrix" drops trailing dimensions of 1, "turn" exchanges two dimensions.
local M = {}

-- ---- applying rules ----

local function captured(name, captures)
  if type(name) == "function" then return name(table.unpack(captures)) end
  return (name:gsub("%%(%d)", function(i) return captures[tonumber(i)] end))
end

-- The tensors that `how` makes of one.
local how = {}

function how.swap(t)
  local half = t.shape[1] // 2
  return require("tycho").concat({ t:narrow(0, half, t.shape[1] - half), t:narrow(0, 0, half) }, 0)
end

function how.matrix(t) return t:reshape(t.shape[1], t.shape[2]) end

function how.turn(t) return t:transpose(0, 1):contiguous() end

local function split(t, count, parts)
  local total, pieces, begin = 0, {}, 0
  for i = 1, count do total = total + (parts and parts[i] or 1) end
  if t.shape[1] % total ~= 0 then return nil end
  for i = 1, count do
    local size = t.shape[1] // total * (parts and parts[i] or 1)
    pieces[i] = t:narrow(0, begin, size)
    begin = begin + size
  end
  return pieces
end

-- What one rule makes of a tensor, put into `result`; true where it fits.
local function apply(rule, name, tensor, result)
  local captures = { name:match(rule[1]) }
  if #captures == 0 then return false end
  if rule[3] == "split" then
    local pieces = split(tensor, #rule[2], rule.parts)
    if not pieces then return false end
    for i, target in ipairs(rule[2]) do result[captured(target, captures)] = pieces[i] end
    return true
  end
  local target = captured(rule[2], captures)
  if not target then return false end
  if rule[3] == "matrix" and tensor.ndim <= 2 then
    result[target] = tensor
  else
    result[target] = rule[3] and how[rule[3]](tensor) or tensor
  end
  return true
end

--- The tensors of a state under their names in diffusers, and the sorted names that no rule fits. rules: a list.
---@param state table<string, Tensor>
---@param rules table[]
---@return table<string, Tensor>
---@return string[] unknown
function M.apply(state, rules)
  local result, unknown = {}, {}
  for name, tensor in pairs(state) do
    local fits = false
    for _, rule in ipairs(rules) do
      fits = apply(rule, name, tensor, result)
      if fits then break end
    end
    if not fits then unknown[#unknown + 1] = name end
  end
  table.sort(unknown)
  return result, unknown
end

-- ---- the U-Net of latent diffusion ----

local resnet = { ["in_layers.0"] = "norm1", ["in_layers.2"] = "conv1", ["emb_layers.1"] = "time_emb_proj",
  ["out_layers.0"] = "norm2", ["out_layers.3"] = "conv2", skip_connection = "conv_shortcut" }

local function renamed(table_)
  return function(where, layer, rest) return table_[layer] and where .. table_[layer] .. "." .. rest end
end

--- The rules of a U-Net. places: input, output: by number { level, layer } of a block of layers, or { level } of what
-- changes the size.
function M.unet(places)
  local function block(list, kind, number, part, rest)
    local place = list[tonumber(number)]
    if not place then return nil end
    local where = ("%s_blocks.%d."):format(kind, place[1])
    if rest:find "^op%." then return where .. "downsamplers.0.conv." .. rest:sub(4) end
    if rest:find "^conv%." then return where .. "upsamplers.0." .. rest end
    if part == "1" then return ("%sattentions.%d.%s"):format(where, place[2], rest) end
    if part ~= "0" then return nil end
    local layer, last = rest:match "^([%a_]+%.?%d*)%.(%a+)$"
    return renamed(resnet)(("%sresnets.%d."):format(where, place[2] or 0), layer, last)
  end
  return {
    { "^time_embed%.0%.(.*)", "time_embedding.linear_1.%1" }, { "^time_embed%.2%.(.*)", "time_embedding.linear_2.%1" },
    { "^label_emb%.0%.0%.(.*)", "add_embedding.linear_1.%1" },
    { "^label_emb%.0%.2%.(.*)", "add_embedding.linear_2.%1" },
    { "^label_emb%.weight$", "class_embedding.weight" }, { "^input_blocks%.0%.0%.(.*)", "conv_in.%1" },
    { "^out%.0%.(.*)", "conv_norm_out.%1" }, { "^out%.2%.(.*)", "conv_out.%1" },
    { "^middle_block%.1%.(.*)", "mid_block.attentions.0.%1" },
    { "^middle_block%.([02])%.([%a_]+%.?%d*)%.(%a+)$", function(i, layer, last)
      return renamed(resnet)(("mid_block.resnets.%d."):format(tonumber(i) // 2), layer, last)
    end },
    { "^input_blocks%.(%d+)%.(%d)%.(.*)", function(...) return block(places.input, "down", ...) end },
    { "^output_blocks%.(%d+)%.(%d)%.(.*)", function(...) return block(places.output, "up", ...) end },
  }
end

-- ---- the autoencoder ----

local attention = { norm = "group_norm", q = "to_q", k = "to_k", v = "to_v", proj_out = "to_out.0" }

--- The rules of the autoencoder, which counts its levels of the decoder from the last one.
---@param levels integer
function M.vae(levels)
  local function level(side, kind, i, rest)
    i = tonumber(i)
    local way = kind == "up" and levels - 1 - i or i
    local where = ("%s.%s_blocks.%d."):format(side, kind, way)
    local resize = rest:match "^%a+sample%.(conv%..*)$"
    if resize then return where .. kind .. "samplers.0." .. resize end
    local kept, number, name = rest:match "^(%a+)%.(%d+)%.(.*)$"
    if kept == "block" then return ("%sresnets.%s.%s"):format(where, number, (name:gsub("^nin_", "conv_"))) end
    local layer, last = (name or ""):match "^([%a_]+)%.(%a+)$"
    return kept == "attn" and renamed(attention)(("%sattentions.%s."):format(where, number), layer, last) or nil
  end
  return {
    { "^(%a+coder)%.mid%.attn_1%.([%a_]+)%.(%a+)$", function(side, layer, last)
      return renamed(attention)(side .. ".mid_block.attentions.0.", layer, last)
    end, "matrix" },
    { "^(%a+coder)%.(%a+)%.(%d+)%.(attn%..*)$", level, "matrix" },
    { "^(%a+coder)%.mid%.block_(%d)%.(.*)$", function(side, i, rest)
      return ("%s.mid_block.resnets.%d.%s"):format(side, tonumber(i) - 1, rest)
    end },
    { "^(%a+coder)%.(%a+)%.(%d+)%.(.*)$", level },
    { "^(%a+coder)%.norm_out%.(.*)", "%1.conv_norm_out.%2" },
    { "^(%a+coder%.conv_in%..*)", "%1" }, { "^(%a+coder%.conv_out%..*)", "%1" }, { "^(quant_conv%..*)", "%1" },
    { "^(post_quant_conv%..*)", "%1" },
  }
end

-- ---- text encoders ----

local layers = { ln_1 = "layer_norm1", ln_2 = "layer_norm2", ["mlp.c_fc"] = "mlp.fc1", ["mlp.c_proj"] = "mlp.fc2",
  ["attn.out_proj"] = "self_attn.out_proj" }
local block = "^transformer%.resblocks%.(%d+)%."
local into = "text_model.encoder.layers.%1.self_attn."

M.open_clip = {
  { "^positional_embedding$", "text_model.embeddings.position_embedding.weight" },
  { "^token_embedding%.weight$", "text_model.embeddings.token_embedding.weight" },
  { "^ln_final%.(.*)", "text_model.final_layer_norm.%1" }, { "^text_projection$", "text_projection.weight", "turn" },
  { block .. "attn%.in_proj_(%a+)$", { into .. "q_proj.%2", into .. "k_proj.%2", into .. "v_proj.%2" }, "split" },
  { block .. "([%a_%.]-%d?)%.(%a+)$", function(i, layer, last)
    return renamed(layers)(("text_model.encoder.layers.%s."):format(i), layer, last)
  end },
}

M.same = { { "^(.*)$", "%1" } }

-- ---- transformers ----

local function embedder(from, to)
  return { ("^%s(.*)"):format(from), ("time_text_embed.%s.%%1"):format(to) }
end

local into_x, into_text = "transformer_blocks.%1.attn%2.", "transformer_blocks.%1.attn."
local function parts(where, names, last)
  local list = {}
  for i, name in ipairs(names) do list[i] = where .. name .. "." .. last end
  return list
end
local own, added = { "to_q", "to_k", "to_v" }, { "add_q_proj", "add_k_proj", "add_v_proj" }

--- Stable Diffusion 3. last: the number of the last block, whose text is only scaled and shifted.
---@param last integer
function M.sd3(last)
  local x, text = "^joint_blocks%.(%d+)%.x_block%.", "^joint_blocks%.(%d+)%.context_block%."
  local out = "transformer_blocks.%1."
  return {
    { "^pos_embed$", "pos_embed.pos_embed" }, { "^x_embedder%.(proj%..*)", "pos_embed.%1" },
    embedder("t_embedder%.mlp%.0%.", "timestep_embedder.linear_1"),
    embedder("t_embedder%.mlp%.2%.", "timestep_embedder.linear_2"),
    embedder("y_embedder%.mlp%.0%.", "text_embedder.linear_1"),
    embedder("y_embedder%.mlp%.2%.", "text_embedder.linear_2"),
    { "^(context_embedder%..*)", "%1" }, { "^final_layer%.linear%.(.*)", "proj_out.%1" },
    { "^final_layer%.adaLN_modulation%.1%.(.*)", "norm_out.linear.%1", "swap" },
    { x .. "attn(2?)%.qkv%.(%a+)$", parts(into_x, own, "%3"), "split" },
    { text .. "attn%.qkv%.(%a+)$", parts(into_text, added, "%2"), "split" },
    { x .. "attn(2?)%.ln_([qk])%.(.*)", into_x .. "norm_%3.%4" },
    { text .. "attn%.ln_([qk])%.(.*)", into_text .. "norm_added_%2.%3" },
    { x .. "attn(2?)%.proj%.(.*)", into_x .. "to_out.0.%3" },
    { text .. "attn%.proj%.(.*)", into_text .. "to_add_out.%2" },
    { x .. "adaLN_modulation%.1%.(.*)", out .. "norm1.linear.%2" },
    { ("^joint_blocks%%.(%d)%%.context_block%%.adaLN_modulation%%.1%%.(.*)"):format(last),
      out .. "norm1_context.linear.%2", "swap" },
    { text .. "adaLN_modulation%.1%.(.*)", out .. "norm1_context.linear.%2" },
    { x .. "mlp%.fc1%.(.*)", out .. "ff.net.0.proj.%2" }, { x .. "mlp%.fc2%.(.*)", out .. "ff.net.2.%2" },
    { text .. "mlp%.fc1%.(.*)", out .. "ff_context.net.0.proj.%2" },
    { text .. "mlp%.fc2%.(.*)", out .. "ff_context.net.2.%2" },
  }
end

local double, single = "^double_blocks%.(%d+)%.", "^single_blocks%.(%d+)%."
local out, one = "transformer_blocks.%1.", "single_transformer_blocks.%1."

local function norms(pattern, q, k)
  return { pattern .. "norm%.query_norm%.scale$", q }, { pattern .. "norm%.key_norm%.scale$", k }
end

M.flux = {
  embedder("time_in%.in_layer%.", "timestep_embedder.linear_1"),
  embedder("time_in%.out_layer%.", "timestep_embedder.linear_2"),
  embedder("vector_in%.in_layer%.", "text_embedder.linear_1"),
  embedder("vector_in%.out_layer%.", "text_embedder.linear_2"),
  embedder("guidance_in%.in_layer%.", "guidance_embedder.linear_1"),
  embedder("guidance_in%.out_layer%.", "guidance_embedder.linear_2"),
  { "^txt_in%.(.*)", "context_embedder.%1" }, { "^img_in%.(.*)", "x_embedder.%1" },
  { "^final_layer%.linear%.(.*)", "proj_out.%1" },
  { "^final_layer%.adaLN_modulation%.1%.(.*)", "norm_out.linear.%1", "swap" },
  { double .. "img_mod%.lin%.(.*)", out .. "norm1.linear.%2" },
  { double .. "txt_mod%.lin%.(.*)", out .. "norm1_context.linear.%2" },
  { double .. "img_attn%.qkv%.(%a+)$", parts(out .. "attn.", own, "%2"), "split" },
  { double .. "txt_attn%.qkv%.(%a+)$", parts(out .. "attn.", added, "%2"), "split" },
  { double .. "img_attn%.proj%.(.*)", out .. "attn.to_out.0.%2" },
  { double .. "txt_attn%.proj%.(.*)", out .. "attn.to_add_out.%2" },
  { double .. "img_mlp%.0%.(.*)", out .. "ff.net.0.proj.%2" }, { double .. "img_mlp%.2%.(.*)", out .. "ff.net.2.%2" },
  { double .. "txt_mlp%.0%.(.*)", out .. "ff_context.net.0.proj.%2" },
  { double .. "txt_mlp%.2%.(.*)", out .. "ff_context.net.2.%2" },
  { single .. "linear1%.(%a+)$", { one .. "attn.to_q.%2", one .. "attn.to_k.%2", one .. "attn.to_v.%2",
    one .. "proj_mlp.%2" }, "split", parts = { 1, 1, 1, 4 } },
  { single .. "linear2%.(.*)", one .. "proj_out.%2" }, { single .. "modulation%.lin%.(.*)", one .. "norm.linear.%2" },
}
for _, group in ipairs {
  { norms(double .. "img_attn%.", out .. "attn.norm_q.weight", out .. "attn.norm_k.weight") },
  { norms(double .. "txt_attn%.", out .. "attn.norm_added_q.weight", out .. "attn.norm_added_k.weight") },
  { norms(single, one .. "attn.norm_q.weight", one .. "attn.norm_k.weight") },
} do table.move(group, 1, 2, #M.flux + 1, M.flux) end

return M
