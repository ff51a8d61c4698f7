--- Checkpoints in one file with the names of their authors: Stable Diffusion 1, 2, XL and 3, Flux, and autoencoders and
-- networks of these alone, in safetensors or PyTorch's zip files. The family is told by names and shapes, the
-- configuration is inferred, the names are changed to those of diffusers; nothing of a file is ever run.
local ty = require "tycho"
local arguments = require "tycho.arguments"
local configs = require "tycho.hub.single.configs"
local rules = require "tycho.hub.single.rules"

local M = {}

-- Tensors that belong to training, or are copies or tables of what the config says.
local ignored = { "^model_ema%.", "^alphas_cumprod", "^betas$", "^sqrt_", "^log_one_minus_", "^posterior_", "^logvar$",
  "^lvlb_weights$", "^first_stage_model%.loss%.", "^loss%.", "position_ids$", "logit_scale$", "%.attn_mask$",
  "^cond_stage_model%.model%.visual%.", "^denoiser%.", "^conditioner%.embedders%.%d%.model%.visual%.",
  "^model_ema$", "^global_step$", "^epoch$" }

local function is_ignored(name)
  for _, pattern in ipairs(ignored) do
    if name:find(pattern) then return true end
  end
  return false
end

-- Where the parts of a checkpoint stand: prefix -> part, and what the part is called in a pipeline.
local places = {
  { "model.diffusion_model.", "network" }, { "first_stage_model.", "vae" }, { "vae.", "vae" },
  { "cond_stage_model.transformer.", "clip", "text_encoder" },
  { "cond_stage_model.model.", "open_clip", "text_encoder" },
  { "conditioner.embedders.0.transformer.", "clip", "text_encoder" },
  { "conditioner.embedders.1.model.", "open_clip", "text_encoder_2", true },
  { "text_encoders.clip_l.transformer.", "clip", "text_encoder" },
  { "text_encoders.clip_g.transformer.", "clip", "text_encoder_2" },
  { "text_encoders.t5xxl.transformer.", "t5", "text_encoder_3" },
}

-- The tensors of a file by part; those of no part are the network's, or those of an autoencoder alone.
local function sorted(state)
  local parts, rest = {}, {}
  for name, tensor in pairs(state) do
    if ty.is_tensor(tensor) and not is_ignored(name) then
      local found
      for _, place in ipairs(places) do
        if name:sub(1, #place[1]) == place[1] then found = place end
      end
      if found then
        local key = found[3] or found[2]
        parts[key] = parts[key] or { place = found, state = {} }
        parts[key].state[name:sub(#found[1] + 1)] = tensor
      else
        rest[name] = tensor
      end
    end
  end
  if next(rest) then
    local alone = rest["decoder.conv_in.weight"] and "vae" or "network"
    if not parts[alone] then
      parts[alone] = { place = { "", alone }, state = rest }
      rest = {}
    end
  end
  return parts, rest
end

-- The family, by the names and shapes of the network and by what stands beside it; nil where there is none known.
local function family_of(parts)
  local network = parts.network and parts.network.state or {}
  if network["double_blocks.0.img_attn.qkv.weight"] then return "flux" end
  if network["joint_blocks.0.x_block.attn.qkv.weight"] then return "sd3" end
  if network["input_blocks.0.0.weight"] then
    if parts.text_encoder_2 or network["label_emb.0.0.weight"] then return "sdxl" end
    local encoder = parts.text_encoder and parts.text_encoder.place[2]
    if encoder then return encoder == "clip" and "sd1" or "sd2" end
    local key = network["middle_block.1.transformer_blocks.0.attn2.to_k.weight"]
    return key and key.ndim == 2 and key.shape[2] == 1024 and "sd2" or "sd1"
  end
  local vae = not parts.network and parts.vae and parts.vae.state["decoder.conv_in.weight"]
  if vae then return vae.ndim == 4 and vae.shape[2] == 16 and "flux" or "sd1" end
  return nil
end

-- By kind of part: the config and the rules. given: keys of the config that the caller knows better.
local kinds = {}

function kinds.network(state, family, given)
  if family == "flux" then return configs.flux(state, given), rules.flux end
  if family == "sd3" then
    local config, last = configs.sd3(state, given)
    return config, rules.sd3(last)
  end
  local config, at = configs.unet(state, family, given)
  return config, rules.unet(at)
end

function kinds.vae(state, family, given)
  local config, levels = configs.vae(state, family, given)
  return config, rules.vae(levels)
end

-- Flux takes the vector of the whole text as it comes, before any projection.
function kinds.clip(state, family, given)
  if family == "flux" then state["text_projection.weight"] = nil end
  return configs.clip(state, given), rules.same
end

function kinds.t5(state, _, given) return configs.t5(state, given), rules.same end

-- Stable Diffusion 2 reads what comes before the last layer of its text encoder, which diffusers has without that.
function kinds.open_clip(state, family, given, projected)
  local config = configs.open_clip(state, projected, given)
  if projected or family ~= "sd2" then return config, rules.open_clip end
  if not (given and given.num_hidden_layers) then config.num_hidden_layers = config.num_hidden_layers - 1 end
  local last, list = config.num_hidden_layers, { { "^text_projection$", function() return "" end } }
  list[2] = { ("^transformer%%.resblocks%%.%d%%.(.*)"):format(last), function() return "" end }
  table.move(rules.open_clip, 1, #rules.open_clip, 3, list)
  return config, list
end

local function fail(text, ...) error(text:format(...), 0) end

local function tensors_of(path)
  local all, state = ty.io.load(path), {}
  if type(all) ~= "table" then fail("expected tensors by name, got %s", arguments.describe(all)) end
  -- Checkpoints of training have the tensors beside what training needs.
  for name, tensor in pairs(all) do
    local rest = type(name) == "string" and name:match "^state_dict%.(.*)$"
    if rest then state[rest] = tensor end
  end
  return next(state) and state or all
end

local names = { network = "unet", sd3 = "transformer", flux = "transformer" }

--- What a file holds: the family and, by the component's name in diffusers, { config, state, unknown }. given: by
-- component, keys of configs that the caller knows better.
---@param path string
---@param given? table<string, table>
---@return { family: string, parts: table<string, table>, unknown: string[] }
function M.read(path, given)
  local parts, rest = sorted(tensors_of(path))
  local family = family_of(parts)
  if not family then
    local some = {}
    for _, part in pairs(parts) do
      for name in pairs(part.state) do some[#some + 1] = part.place[1] .. name end
    end
    for name in pairs(rest) do some[#some + 1] = name end
    table.sort(some)
    fail("expected a config.json beside it, or a checkpoint of Stable Diffusion 1, 2, XL or 3 or of Flux, got tensors "
      .. "such as %s",
      #some > 0 and table.concat(some, ", ", 1, math.min(3, #some)) or "none")
  end
  local result = { family = family, parts = {}, unknown = {} }
  for name in pairs(rest) do table.insert(result.unknown, name) end
  for key, part in pairs(parts) do
    local name = key == "network" and (names[family] or names.network) or key
    if family == "flux" and name == "text_encoder_3" then name = "text_encoder_2" end -- T5 is its second
    local ok, config, list = pcall(kinds[part.place[2]], part.state, family, given and given[name], part.place[4])
    if not ok then fail("%s: %s", name, config) end
    local state, unknown = rules.apply(part.state, list)
    state[""] = nil -- what is left out on purpose
    for i, each in ipairs(unknown) do unknown[i] = part.place[1] .. each end
    result.parts[name] = { config = config, state = state, unknown = unknown }
  end
  table.sort(result.unknown)
  return result
end

--- Names of the components of a file's network, which hub.load() gives where nothing else is asked for.
M.networks = { "unet", "transformer", "vae" }

-- Pipelines' classes by family.
M.classes = { sd1 = "StableDiffusionPipeline", sd2 = "StableDiffusionPipeline", sdxl = "StableDiffusionXLPipeline",
  sd3 = "StableDiffusion3Pipeline", flux = "FluxPipeline" }

--- The config of the scheduler that goes with what was read.
function M.scheduler(read)
  local network = read.parts.transformer
  return configs.scheduler(read.family, network and network.config.guidance_embeds)
end

return M
