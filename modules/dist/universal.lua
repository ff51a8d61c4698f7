--- Checkpoints of ranks that any other number and arrangement of ranks can go on from. Lian et al. 2024, "Universal
-- Checkpointing: Efficient and Flexible Checkpointing for Large Scale Distributed Training".
--
-- Ranks save what they have, all at once; what is saved is put together when it is first loaded, into an atom for each
-- parameter: a file with the whole parameter and what an optimizer knows of it. A rank of another layout takes its
-- parts of the atoms. Which part of a parameter a rank has is said in a language of patterns:
--
--     local language = universal.language {
--       { "%.q_proj%.weight$", "sharded", dim = 0 },   -- cut along a dimension, in the order of ranks
--       { "%.qkv%.weight$", "sharded", dim = 0, parts = 3 }, -- three that are each cut so
--       { "embed", "sharded", dim = 0, padded = true },      -- filled up with zeros to a multiple of the ranks
--       { "alpha$", "averaged" },                            -- each rank has its own; their mean is the parameter
--       { "", "replicated" },                                -- all have the same
--     }
--
-- Besides save() and open() there are saver(), which saves while training goes on, and load(), by which ranks read what
-- they want straight from what was saved, each byte once.
--
--   <path>/rank-0000.json, rank-0000.safetensors ...  what ranks saved
--   <path>/state.json, checksums.json                 plain values, and sums of these files
--   <path>/atoms/                                     index.json, 00000.safetensors ..., checksums.json
local ty = require "tycho"
local arguments = require "tycho.arguments"
local folders = require "tycho.folders"
local Group = require "tycho.dist.group"
local files = require "tycho.dist.universal_files"
local parts_of = require "tycho.dist.universal_parts"
local shipped = require "tycho.shipped"

local expect, fail = arguments.expect, arguments.fail
local io = ty.io
local M = {}

M.language = parts_of.language
M.saver = require "tycho.dist.universal_saver"
M.load = require "tycho.dist.universal_reader"

-- The folder that holds the newest complete checkpoint, or nil.
local function find(path) return folders.find(path, "state.json") end

--- Whether there is a checkpoint.
---@param path string
---@return boolean
function M.exists(path)
  expect("dist.universal.exists", "path", path, "a string")
  return find(path) ~= nil
end

-- ---- saving ----

--- Saves what the ranks of a group have, each its own, at the same time. A piece is { name, slot, tensor, part,
-- begin }: of a parameter's slot ("weight", "exp_avg" and so on) that part which language:part() gives, or of this,
-- laid flat, the elements from `begin` on (0), as ranks have that share an optimizer's state. A kill at any moment
-- leaves the old checkpoint or the new one. All ranks call it.
---@param group RankGroup
---@param path string  a folder
---@param pieces { name: string, slot: string, tensor: Tensor, part: UniversalPart, begin?: integer }[]
---@param values? table<string, string|number|boolean>  of rank 0: steps and the like
---@param options? { rate?: integer }  bytes a second that a rank writes at most (0: no limit)
function M.save(group, path, pieces, values, options)
  local who = "dist.universal.save"
  Group.expect(who, group)
  expect(who, "path", path, "a string")
  expect(who, "pieces", pieces, "a list of tables")
  expect(who, "values", values, "a table or nil")
  files.check_values(who, values or {})
  local o = arguments.read(who, options, { rate = 0 }, { rate = "an integer >= 0" })
  local tensors, entries = {}, {}
  for i, piece in ipairs(pieces) do
    parts_of.check_piece(who, i, piece)
    local key = ("%d"):format(i)
    tensors[key] = piece.tensor:detach():contiguous()
    entries[i] = { key = key, name = piece.name, slot = piece.slot, begin = piece.begin or 0,
      part = parts_of.plain(piece.part) }
  end
  if group.rank == 0 then folders.begin(path) end
  group:barrier()
  files.write(path .. ".partial", group.rank, tensors, entries, o.rate)
  group:barrier()
  if group.rank == 0 then files.commit(path, path .. ".partial", group.size, values or {}) end
  group:barrier()
end

-- ---- putting together ----

-- All pieces of a checkpoint by name and slot; tensors are mapped.
local function read_pieces(who, folder)
  local ranks, values = files.read_state(who, folder)
  local all, names = {}, {}
  for rank = 0, ranks - 1 do
    local file = folder .. "/" .. files.rank_name(rank)
    local list = files.read_list(who, folder, rank)
    local ok, tensors = pcall(io.load_safetensors, file .. ".safetensors")
    if not ok then fail("%s: %s is damaged: %s", who, folder, tostring(tensors)) end
    for i, entry in ipairs(list) do
      local piece = type(entry) == "table" and entry or {}
      piece.tensor = type(piece.key) == "string" and tensors[piece.key] or nil
      parts_of.check_piece(("%s: %s.json is damaged"):format(who, file), i, piece)
      local of = all[piece.name]
      if not of then
        of = { slots = {}, order = {} }
        all[piece.name], names[#names + 1] = of, piece.name
      end
      if not of.slots[piece.slot] then
        of.slots[piece.slot] = {}
        of.order[#of.order + 1] = piece.slot
      end
      table.insert(of.slots[piece.slot], piece)
    end
  end
  table.sort(names)
  return all, names, values
end

--- Puts the saved pieces of a checkpoint together, into atoms; the ranks of the group share the work. What some ranks
-- have must cover every parameter, and what is said to be the same must be. Where that is done already nothing is.
-- All ranks call it.
---@param group RankGroup
---@param path string
function M.consolidate(group, path)
  local who = "dist.universal.consolidate"
  Group.expect(who, group)
  expect(who, "path", path, "a string")
  local folder = find(path)
  if not folder then fail("%s: there is no checkpoint at %s", who, path) end
  local done = io.exists(folder .. "/atoms/index.json")
  group:barrier() -- before anyone changes what the others look for
  if done then return end
  local partial = folder .. "/atoms.partial"
  if group.rank == 0 then
    shipped.verify(who, folder, { required = true })
    folders.begin(folder .. "/atoms")
  end
  group:barrier()
  local all, names, values = read_pieces(who, folder)
  local index = ty.core.io.array {}
  for i, name in ipairs(names) do
    local of, atom = all[name], {}
    local file, slots = ("%05d.safetensors"):format(i - 1), ty.core.io.array {}
    table.sort(of.order)
    for k, slot in ipairs(of.order) do slots[k] = slot end
    index[i] = { name = name, file = file, slots = slots,
      shape = parts_of.shape_of(of.slots[of.order[1]][1].part) }
    if (i - 1) % group.size == group.rank then
      ty.scope(function()
        for _, slot in ipairs(of.order) do atom[slot] = parts_of.whole(who, name, slot, of.slots[slot]) end
        io.save_safetensors(partial .. "/" .. file, atom)
      end)
    end
  end
  group:barrier()
  if group.rank == 0 then
    io.save_json(partial .. "/index.json", { version = files.version, atoms = index, values = values })
    shipped.write_checksums(partial)
    folders.replace(folder .. "/atoms")
  end
  group:barrier()
end

-- ---- loading ----

--- A checkpoint in atoms, of which a rank takes what it wants.
---@class UniversalCheckpoint
---@field values table<string, string|number|boolean>
---@field names string[]
local Checkpoint = {}
Checkpoint.__index = Checkpoint
Checkpoint.__name = "UniversalCheckpoint"

--- Opens a checkpoint, putting it together before where that has not been done. All ranks of the group call it, of
-- whatever number and arrangement.
---@param group RankGroup
---@param path string
---@return UniversalCheckpoint
function M.open(group, path)
  local who = "dist.universal.open"
  M.consolidate(group, path)
  local folder = find(path) .. "/atoms"
  if group.rank == 0 then shipped.verify(who, folder, { required = true }) end
  group:barrier()
  local index = files.read_json(who, folder .. "/index.json")
  local self = setmetatable({ folder = folder, atoms = {}, names = {}, values = {}, files = {} }, Checkpoint)
  for key, value in pairs(type(index.values) == "table" and index.values or {}) do self.values[key] = value end
  if type(index.atoms) ~= "table" then fail("%s: %s is damaged: index.json has no atoms", who, folder) end
  for i, atom in ipairs(index.atoms) do
    local fine = type(atom) == "table" and type(atom.name) == "string" and type(atom.file) == "string"
      and atom.file:find "^%d+%.safetensors$" and parts_of.is_shape(atom.shape) and type(atom.slots) == "table"
    if not fine then fail("%s: %s is damaged: index.json, atom %d", who, folder, i) end
    self.atoms[atom.name], self.names[i] = atom, atom.name
  end
  return self
end

--- The slots of a parameter: "weight" and what an optimizer keeps. nil where there is no such parameter.
---@param name string
---@return string[]?
function Checkpoint:slots(name)
  expect("UniversalCheckpoint:slots", "name", name, "a string")
  local atom = self.atoms[name]
  return atom and table.move(atom.slots, 1, #atom.slots, 1, {})
end

--- A part of a parameter's slot, or of this, laid flat, `count` elements from `begin` on.
---@param name string
---@param slot string
---@param part UniversalPart  of language:part()
---@param begin? integer
---@param count? integer
---@return Tensor
function Checkpoint:take(name, slot, part, begin, count)
  local who = "UniversalCheckpoint:take"
  expect(who, "name", name, "a string")
  expect(who, "slot", slot, "a string")
  parts_of.check_part(who, part)
  expect(who, "begin", begin, "an integer >= 0 or nil")
  expect(who, "count", count, "an integer >= 0 or nil")
  local atom = self.atoms[name]
  if not atom then fail("%s: the checkpoint has no '%s'", who, name) end
  local shape, wanted = parts_of.shape_of(part), table.concat(atom.shape, ", ")
  if table.concat(shape, ", ") ~= wanted then
    fail("%s: %s has shape [%s] in the checkpoint, expected [%s]", who, name, wanted, table.concat(shape, ", "))
  end
  if not self.files[atom.file] then
    local ok, tensors = pcall(io.load_safetensors, self.folder .. "/" .. atom.file)
    if not ok then fail("%s: %s is damaged: %s", who, self.folder, tostring(tensors)) end
    self.files[atom.file] = tensors
  end
  local whole = self.files[atom.file][slot]
  if not whole then fail("%s: the checkpoint has no %s of '%s'", who, slot, name) end
  if table.concat(whole.shape, ", ") ~= wanted then
    fail("%s: %s is damaged: %s of %s is %s, expected [%s]", who, self.folder, slot, name, arguments.describe(whole),
      wanted)
  end
  local own = parts_of.take(whole, part)
  if not begin then return own:clone() end
  count = count or own:numel() - begin
  if begin + count > own:numel() then
    fail("%s: expected at most the %d elements of the part, got %d from %d on", who, own:numel(), count, begin)
  end
  return own:reshape(-1):narrow(0, begin, count):clone()
end

return M
