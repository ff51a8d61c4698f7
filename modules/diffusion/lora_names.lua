--- Which layer of a pipeline a name in a LoRA file means: diffusers' names, those of kohya's scripts with "_" for ".",
-- and those of the authors of Stable Diffusion XL, 3 and Flux, where one layer may stand for several of ours.
local surgery = require("tycho").nn.surgery
local peft_names = require "tycho.peft.names"

local M = {}

-- Prefixes of names, and the component that they stand for ("network": the one that draws); the longest first.
local prefixes = { { "model.diffusion_model.", "network" }, { "diffusion_model.", "network" },
  { "lora_transformer_", "network" }, { "text_encoder_2.", "text_encoder_2" }, { "text_encoder_3.", "text_encoder_3" },
  { "text_encoder.", "text_encoder" }, { "transformer.", "network" }, { "lora_unet_", "network" },
  { "lora_te1_", "text_encoder" }, { "lora_te2_", "text_encoder_2" }, { "lora_te3_", "text_encoder_3" },
  { "lora_te_", "text_encoder" }, { "unet.", "network" } }

--- The component that a name is of, and the rest of the name. A name without a prefix is the network's.
---@param path string
---@return string component
---@return string rest
function M.component(path)
  for _, prefix in ipairs(prefixes) do
    if path:sub(1, #prefix[1]) == prefix[1] then
      return prefix[2], (path:sub(#prefix[1] + 1):gsub("^base_model%.model%.", ""))
    end
  end
  return "network", (path:gsub("^base_model%.model%.", ""))
end

-- ---- names of the authors ----

local resnet = { conv1 = "in_layers_2", time_emb_proj = "emb_layers_1", conv2 = "out_layers_3",
  conv_shortcut = "skip_connection" }
local outside = { ["conv_in"] = "input_blocks_0_0", conv_out = "out_2", ["time_embedding.linear_1"] = "time_embed_0",
  ["time_embedding.linear_2"] = "time_embed_2", ["add_embedding.linear_1"] = "label_emb_0_0",
  ["add_embedding.linear_2"] = "label_emb_0_2" }

-- The number of the first block of each level, and what it counts up to.
local function starts(levels, first, resizes)
  local list, at = {}, first
  for i, level in ipairs(levels) do
    list[i] = at
    at = at + #level.resnets + (resizes and level.downsamplers and 1 or 0)
  end
  return list
end

-- The name that a U-Net's layer has in the authors' files, flat; nil where it has none.
local function of_unet(model, down, up, name)
  if outside[name] then return outside[name] end
  local part, i, rest = name:match "^mid_block%.(%a+)%.(%d+)%.(.*)$"
  if part == "attentions" then return "middle_block_1_" .. rest:gsub("%.", "_") end
  if part then return resnet[rest] and ("middle_block_%d_%s"):format(2 * i, resnet[rest]) end
  local way, level, kind
  way, level, kind, i, rest = name:match "^(%a+)_blocks%.(%d+)%.(%a+)%.(%d+)%.(.*)$"
  if not way then return nil end
  level, i = math.tointeger(tonumber(level)) + 1, math.tointeger(tonumber(i))
  local blocks = way == "down" and model.down_blocks[level] or model.up_blocks[level]
  local where = way == "down" and "input_blocks" or "output_blocks"
  local first = way == "down" and down[level] or up[level]
  if kind == "resnets" then
    return resnet[rest] and ("%s_%d_0_%s"):format(where, first + i, resnet[rest])
  elseif kind == "attentions" then
    return ("%s_%d_1_%s"):format(where, first + i, (rest:gsub("%.", "_")))
  elseif kind == "downsamplers" then
    return ("%s_%d_0_op"):format(where, first + #blocks.resnets)
  end
  return ("%s_%d_%d_conv"):format(where, first + #blocks.resnets - 1, blocks.attentions and 2 or 1)
end

local flux = {
  img_attn_qkv = { "attn.to_q", "attn.to_k", "attn.to_v" }, img_attn_proj = { "attn.to_out.0" },
  txt_attn_qkv = { "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj" }, txt_attn_proj = { "attn.to_add_out" },
  img_mlp_0 = { "ff.net.0.proj" }, img_mlp_2 = { "ff.net.2" }, txt_mlp_0 = { "ff_context.net.0.proj" },
  txt_mlp_2 = { "ff_context.net.2" }, img_mod_lin = { "norm1.linear" }, txt_mod_lin = { "norm1_context.linear" },
}
local flux_single = { linear1 = { "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp" }, linear2 = { "proj_out" },
  modulation_lin = { "norm.linear" } }
local flux_outside = { img_in = "x_embedder", txt_in = "context_embedder", final_layer_linear = "proj_out",
  final_layer_adaLN_modulation_1 = "norm_out.linear" }
for theirs, ours in pairs { time_in = "timestep_embedder", vector_in = "text_embedder",
  guidance_in = "guidance_embedder" } do
  flux_outside[theirs .. "_in_layer"] = ("time_text_embed.%s.linear_1"):format(ours)
  flux_outside[theirs .. "_out_layer"] = ("time_text_embed.%s.linear_2"):format(ours)
end
local sd3 = {
  x_block_attn_qkv = { "attn.to_q", "attn.to_k", "attn.to_v" }, x_block_attn_proj = { "attn.to_out.0" },
  x_block_attn2_qkv = { "attn2.to_q", "attn2.to_k", "attn2.to_v" }, x_block_attn2_proj = { "attn2.to_out.0" },
  context_block_attn_qkv = { "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj" },
  context_block_attn_proj = { "attn.to_add_out" }, x_block_mlp_fc1 = { "ff.net.0.proj" },
  x_block_mlp_fc2 = { "ff.net.2" }, context_block_mlp_fc1 = { "ff_context.net.0.proj" },
  context_block_mlp_fc2 = { "ff_context.net.2" }, x_block_adaLN_modulation_1 = { "norm1.linear" },
}

-- Adds the flat names of a transformer's blocks.
local function of_blocks(result, blocks, theirs, ours, map)
  for i = 0, #(blocks or {}) - 1 do
    for name, targets in pairs(map) do
      local list = {}
      for k, target in ipairs(targets) do list[k] = ("%s.%d.%s"):format(ours, i, target) end
      result[("%s_%d_%s"):format(theirs, i, name)] = { names = list }
    end
  end
end

-- By flat name of the authors: { names of our layers, swap }.
local function aliases(model, names)
  local result, architecture = {}, model.architecture
  if architecture == "FluxTransformer2DModel" then
    of_blocks(result, model.transformer_blocks, "double_blocks", "transformer_blocks", flux)
    of_blocks(result, model.single_transformer_blocks, "single_blocks", "single_transformer_blocks", flux_single)
    for theirs, ours in pairs(flux_outside) do
      -- The authors shift before they scale.
      result[theirs] = { names = { ours }, swap = ours == "norm_out.linear" }
    end
  elseif architecture == "SD3Transformer2DModel" then
    of_blocks(result, model.transformer_blocks, "joint_blocks", "transformer_blocks", sd3)
  elseif model.down_blocks and model.up_blocks then
    local down, up = starts(model.down_blocks, 1, true), starts(model.up_blocks, 0, false)
    for _, name in ipairs(names) do
      local theirs = of_unet(model, down, up, name)
      if theirs then result[theirs] = { names = { name } } end
    end
  end
  return result
end

-- ---- looking up ----

--- A function that finds what the rest of a name (see M.component) means in a model: { names = the layers, swap }, or
-- nil and why not.
---@param model Module
---@return fun(rest: string): table?, string?
function M.finder(model)
  local names, modules = surgery.modules(model)
  local resolve, known = peft_names.resolver(model, names), nil
  local flat = {}
  for _, name in ipairs(names) do flat[name:gsub("%.", "_")] = name end
  local function has(name) return modules[name] ~= nil end
  return function(rest)
    local name = resolve(rest, has) or flat[rest]
    if not name then
      for _, prefix in ipairs(model.missing_prefixes or {}) do
        name = name or flat[prefix:gsub("%.", "_") .. rest]
      end
    end
    if name then return { names = { name } } end
    known = known or aliases(model, names)
    return known[(rest:gsub("%.", "_"))]
  end, modules
end

return M
