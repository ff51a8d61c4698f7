--- Positions of Qwen2-VL's and Qwen2.5-VL's tokens by time, row and column (M-RoPE): text counts on by one; what a
-- picture or a clip becomes has the position at which it begins, and times, rows and columns from there on. Wang et al.
-- 2024, "Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any Resolution"; Bai et al. 2025,
-- "Qwen2.5-VL Technical Report", where times of clips are in parts of a second.
--
-- Text behind a clip goes on from the larger of its rows and columns, as transformers has it since its version 5, and
-- what is generated from the largest position of all.
local ty = require "tycho"
local arguments = require "tycho.arguments"

local M = {}

local MOST = 1 << 20 -- positions; their angles are kept in a table

local function as_f32(x) return (string.unpack("f", string.pack("f", x))) end

-- Positions of a clip's `count` times, which are `interval` apart, in the arithmetic of torch: whole ones, cut off.
local function times_of(count, interval)
  local times = {}
  for t = 0, count - 1 do times[t + 1] = math.tointeger(as_f32(t * as_f32(interval)) // 1) end
  return times
end

--- By time, row and column, i64 [3, n, t], of tokens [n, t], and the position behind each row, i64 [n, 1].
---@param who string
---@param tokens Tensor
---@param mask? Tensor    bool or i64 [n, t], 0: padding
---@param merge integer   patches of a side that one feature has
---@param kinds table     by the token that stands for a feature: { what = "picture", sizes = "sizes", grids = list of
-- { times, rows, columns }, intervals = positions from one time to the next, a list (nil: 1) }
---@return Tensor axes
---@return Tensor behind
function M.of(who, tokens, mask, merge, kinds)
  local seen = mask and mask:to("u8"):tolist()
  local list, behind, next_of = { {}, {}, {} }, {}, {}
  for i, row in ipairs(tokens:tolist()) do
    local axes, position, highest, k = { {}, {}, {} }, 0, -1, 1
    while k <= #row do
      local token, kind = row[k], kinds[row[k]]
      if seen and seen[i][k] == 0 then
        axes[1][k], axes[2][k], axes[3][k] = 0, 0, 0
        k = k + 1
      elseif kind then
        local number = (next_of[token] or 0) + 1
        local grid = kind.grids[number]
        if not grid then
          arguments.fail("%s: %s: expected one for each of the %ss in the text, got %d", who, kind.sizes, kind.what,
            #kind.grids)
        end
        next_of[token] = number
        local rows, columns = grid[2] // merge, grid[3] // merge
        local times = times_of(grid[1], kind.intervals and kind.intervals[number] or 1)
        local count = grid[1] * rows * columns
        for p = 0, count - 1 do
          if row[k] ~= token or seen and seen[i][k] == 0 then
            arguments.fail("%s: tokens: expected the %d tokens that %s %d has features, got %d", who, count, kind.what,
              number, p)
          end
          axes[1][k] = position + times[p // (rows * columns) + 1]
          axes[2][k] = position + p // columns % rows
          axes[3][k] = position + p % columns
          k = k + 1
        end
        highest = math.max(highest, position + math.max(times[#times], rows - 1, columns - 1))
        position = position + math.max(rows, columns)
      else
        axes[1][k], axes[2][k], axes[3][k] = position, position, position
        highest = math.max(highest, position)
        position, k = position + 1, k + 1
      end
    end
    if highest >= MOST then
      arguments.fail("%s: tokens: expected positions below %d, got %d", who, MOST, highest)
    end
    for a = 1, 3 do list[a][i] = axes[a] end
    behind[i] = { highest + 1 }
  end
  local function integers(x) return ty.tensor(x, { dtype = "i64" }):to { device = tokens.device } end
  return integers(list), integers(behind)
end

--- Of a call whose tokens are text alone and follow those in the cache.
---@param tokens Tensor
---@param behind Tensor  as of() or after() gave it
---@return Tensor axes
---@return Tensor behind
function M.after(tokens, behind)
  local n, t = tokens.shape[1], tokens.shape[2]
  local axes = behind + ty.arange(t, { device = tokens.device })
  return axes:unsqueeze(0):expand(3, n, t), behind + t
end

return M
